"""Groups, shares, teams, recipes and parts of a whole."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import Problem
from jaxmoe.tasks.working import add, div, mul, sub


_PARTS = (("half", 2), ("a third", 3), ("a quarter", 4), ("a fifth", 5))


def share_equally(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    n, a = d.number(2, 9), d.integer(2, 30)
    question = d.pick(
        (
            f"{p} shares {n * a} {t} equally among {n} friends. How many {t} does each friend get?",
            f"{n} children share {n * a} {t} equally. How many {t} does each child get?",
            f"{n * a} {t} are dealt out to {n} people so that all get the same. "
            f"How many {t} is that for each?",
        )
    )
    return question, [f"{n} people share, so each gets {div(n * a, n)} {t}."], a


def share_after_keeping(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    n, a, b = d.number(2, 9), d.integer(2, 15), d.number(2, 30)
    total = n * a + b
    question = d.pick(
        (
            f"{p} has {total} {t}, keeps {b} and shares the rest equally among {n} friends. "
            f"How many {t} does each friend get?",
            f"Of {total} {t}, {p} puts {b} aside. The others are shared equally by {n} children. "
            f"How many does each child get?",
        )
    )
    lines = [f"{sub(total, b)} {t} are shared.", f"Each one gets {div(n * a, n)} {t}."]
    return question, lines, a


def share_after_joining(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    n, a = d.number(2, 9), d.integer(2, 15)
    first = d.within(2, n * a - 2)
    question = d.pick(
        (
            f"{p} has {first} {t} and {q} has {n * a - first}. They put them together and share "
            f"them equally among {n} children. How many {t} does each child get?",
            f"{p} brings {first} {t} and {q} brings {n * a - first}. {n} friends divide them "
            f"equally. How many {t} is that for each?",
        )
    )
    lines = [
        f"Together there are {add(first, n * a - first)} {t}.",
        f"Each one gets {div(n * a, n)} {t}.",
    ]
    return question, lines, a


def boxes_shared(d: Draw) -> Problem:
    p, t, (_, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    n, m = d.number(2, 6), d.number(2, 6)
    b = m * d.integer(1, 6)
    question = d.pick(
        (
            f"{p} opens {n} {boxes} of {b} {t} and shares all of them equally among {m} people. "
            f"How many {t} does each get?",
            f"{m} friends share {n} {boxes} equally. There are {b} {t} in each of the {boxes}. "
            f"How many {t} does each friend get?",
        )
    )
    lines = [f"In all there are {mul(n, b)} {t}.", f"Each gets {div(n * b, m)} {t}."]
    return question, lines, n * b // m


def left_over_sharing(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    n = d.number(3, 9)
    total = d.number(2 * n, 99)
    q, r = divmod(total, n)
    question = d.pick(
        (
            f"{p} shares {total} {t} equally among {n} friends, as many as possible. "
            f"How many {t} are left over?",
            f"{n} children get equally many of {total} {t}. How many {t} cannot be shared?",
        )
    )
    lines = [
        f"Each gets {q}, because {mul(n, q)} is the largest multiple of {n} up to {total}.",
        f"{sub(total, n * q)} {t} are left over.",
    ]
    return question, lines, r


def part_given(d: Draw) -> Problem:
    p, q, t, (word, k) = *d.people(2), d.pick(words.THINGS), d.pick(_PARTS)
    a = k * d.integer(2, 20)
    question = d.pick(
        (
            f"{p} has {a} {t} and gives {word} of them to {q}. How many {t} does {p} keep?",
            f"{p} had {a} {t}. {word.capitalize()} of them went to {q}. How many are left for {p}?",
        )
    )
    lines = [f"{q} gets {div(a, k)} {t}.", f"{p} keeps {sub(a, a // k)} {t}."]
    return question, lines, a - a // k


def part_then_more(d: Draw) -> Problem:
    p, q, t, (word, k) = *d.people(2), d.pick(words.THINGS), d.pick(_PARTS)
    a = k * d.integer(4, 20)
    b = d.within(1, a - a // k)
    question = d.pick(
        (
            f"{p} has {a} {t}. {word.capitalize()} of them are sold, and {b} are given to {q}. "
            f"How many {t} are left?",
            f"Of {p}'s {a} {t}, {word} are sold. Then {q} gets {b}. How many does {p} still have?",
        )
    )
    lines = [
        f"{div(a, k)} {t} are sold.",
        f"That leaves {sub(a, a // k)} {t}.",
        f"Then {sub(a - a // k, b)} {t} are left.",
    ]
    return question, lines, a - a // k - b


def part_of_group(d: Draw) -> Problem:
    (word, k), (group, x, y) = d.pick(_PARTS), d.pick(
        (
            ("pupils", "walk to school", "come by bus"), ("guests", "drink tea", "drink juice"),
            ("players", "wear blue", "wear white"), ("workers", "start early", "start late"),
            ("birds", "sit in the tree", "sit on the roof"), ("visitors", "stay inside", "go out"),
            ("singers", "are children", "are adults"), ("sheep", "are black", "are white"),
        )
    )  # fmt: skip
    a = k * d.integer(2, 25)
    question = d.pick(
        (
            f"Of {a} {group}, {word} {x} and the others {y}. How many {group} {y}?",
            f"There are {a} {group}. {word.capitalize()} of them {x}, the rest {y}. "
            f"How many of the {group} {y}?",
        )
    )
    lines = [f"{div(a, k)} {group} {x}.", f"{sub(a, a // k)} {group} {y}."]
    return question, lines, a - a // k


def percent_of_group(d: Draw) -> Problem:
    percent, k = d.pick(((50, 2), (25, 4), (20, 5), (10, 10)))
    group, x = d.pick(
        (("pupils", "play chess"), ("trees", "are oaks"), ("books", "are new"), ("cars", "are red"),
         ("seats", "are free"), ("people", "have a dog"), ("houses", "are empty"),
         ("boats", "are out"))
    )  # fmt: skip
    a = k * d.integer(2, 30)
    question = d.pick(
        (
            f"Of {a} {group}, {percent}% {x}. How many {group} {x}?",
            f"There are {a} {group}, and {percent} percent of them {x}. How many is that?",
        )
    )
    return question, [f"{percent}% is one part in {k}: {div(a, k)} {group} {x}."], a // k


def recipe_scaled(d: Draw) -> Problem:
    p, (food, need, unit) = d.person(), d.pick(
        (
            ("pancakes", "eggs", ""), ("soup", "carrots", ""), ("bread", "flour", "cups"),
            ("lemonade", "lemons", ""), ("rice pudding", "milk", "cups"), ("salad", "tomatoes", ""),
            ("stew", "potatoes", ""), ("jam", "plums", ""), ("cake", "sugar", "spoons"),
        )
    )  # fmt: skip
    n, a, k = d.number(2, 6), d.number(2, 12), d.number(2, 6)
    amount = f"{unit} of {need}" if unit else need
    question = d.pick(
        (
            f"A recipe of {food} for {n} people needs {a} {amount}. How many {amount} does {p} "
            "need "
            f"for {n * k} people?",
            f"{p} makes {food} for {n * k} people. For {n} people {p.he} would take {a} {amount}. "
            f"How many {amount} does {p.he} take?",
        )
    )
    lines = [
        f"{n * k} people are {div(n * k, n)} times as many.",
        f"So it takes {mul(k, a)} {amount}.",
    ]
    return question, lines, k * a


def teams(d: Draw) -> Problem:
    n, a = d.number(2, 12), d.integer(2, 11)
    total = n * a
    b = d.within(2, total - 2)
    sport = d.pick(("football", "chess", "rowing", "a quiz", "running", "hockey", "a hike"))
    question = d.pick(
        (
            f"{b} girls and {total - b} boys come for {sport} and form teams of {n}. "
            f"How many teams are there?",
            f"For {sport}, {total - b} boys and {b} girls are put into teams of {n} each. "
            f"How many teams does that make?",
        )
    )
    lines = [
        f"There are {add(b, total - b)} children.",
        f"Teams of {n} make {div(total, n)} teams.",
    ]
    return question, lines, a


def classes(d: Draw) -> Problem:
    n, a, gone = d.number(2, 9), d.number(15, 30), d.number(2, 12)
    place = d.pick(("the museum", "the lake", "the farm", "the zoo", "the theatre", "the castle"))
    question = d.pick(
        (
            f"{n} classes of {a} pupils go to {place}. {gone} pupils are ill and stay at home. "
            f"How many pupils go?",
            f"A school sends {n} classes with {a} pupils each to {place}, but {gone} pupils cannot "
            f"come. How many pupils come?",
        )
    )
    lines = [f"The classes have {mul(n, a)} pupils.", f"{sub(n * a, gone)} of them go."]
    return question, lines, n * a - gone


def tables(d: Draw) -> Problem:
    a, b, c, e = d.number(2, 9), d.number(2, 8), d.number(2, 9), d.number(2, 8)
    place = d.pick(("café", "restaurant", "canteen", "hall", "garden"))
    question = d.pick(
        (
            f"A {place} has {a} tables for {b} people and {c} tables for {e}. "
            f"How many people can sit there?",
            f"In the {place}, {a} tables have {b} seats each and {c} tables have {e} seats each. "
            f"How many seats are there?",
        )
    )
    lines = [
        f"The first tables seat {mul(a, b)}.",
        f"The others seat {mul(c, e)}.",
        f"Together {add(a * b, c * e)}.",
    ]
    return question, lines, a * b + c * e


def bus(d: Draw) -> Problem:
    start, a = d.number(5, 50), d.number(2, 20)
    b = d.within(2, start)
    vehicle = d.pick(("bus", "train", "ferry", "tram", "lift"))
    more = d.chance(0.5)
    c = d.number(2, 20)
    question = d.pick(
        (
            f"{start} people are on a {vehicle}. {b} get off and {a} get on. ",
            f"A {vehicle} carries {start} people. At a stop {b} leave it and {a} enter. ",
        )
    )
    lines = [f"{sub(start, b)} people stay on.", f"Then there are {add(start - b, a)} people."]
    total = start - b + a
    if more:
        question += f"At the next stop {c} get on. "
        lines.append(f"After the next stop there are {add(total, c)} people.")
        total += c
    return question + f"How many people are on the {vehicle} now?", lines, total


def votes(d: Draw) -> Problem:
    p, q, r = d.people(3)
    a, b = d.number(5, 60), d.number(2, 20)
    b = min(b, a - 1)
    c = d.number(2, 50)
    question = d.pick(
        (
            f"In a vote {p} gets {a} votes, {q} gets {b} fewer than {p}, and {r} gets {c}. "
            f"How many votes are there in all?",
            f"{p} got {a} votes and {r} got {c}. {q} got {b} fewer than {p}. How many people "
            "voted?",
        )
    )
    lines = [f"{q} gets {sub(a, b)} votes.", f"Together there are {add(a, a - b, c)} votes."]
    return question, lines, a + a - b + c


def give_to_each(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    n, a = d.number(2, 9), d.number(2, 12)
    total = n * a + d.integer(0, 60)
    question = d.pick(
        (
            f"{p} has {total} {t} and gives {a} to each of {n} friends. How many {t} are left?",
            f"Each of {n} guests gets {a} {t} from {p}, who had {total}. "
            f"How many {t} does {p} still have?",
        )
    )
    lines = [f"{p} gives away {mul(n, a)} {t}.", f"{sub(total, n * a)} {t} are left."]
    return question, lines, total - n * a


def each_brings(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    n, a, m, b = d.number(2, 9), d.number(2, 12), d.number(2, 9), d.number(2, 12)
    question = d.pick(
        (
            f"{n} children bring {a} {t} each, and {m} adults bring {b} {t} each. "
            f"How many {t} are brought?",
            f"For the fair, {n} neighbours give {p} {a} {t} each and {m} friends give {b} each. "
            f"How many {t} does {p} get?",
        )
    )
    lines = [f"{mul(n, a)} {t}.", f"{mul(m, b)} {t}.", f"Together {add(n * a, m * b)} {t}."]
    return question, lines, n * a + m * b


def pizza(d: Draw) -> Problem:
    slices, people = d.pick((4, 6, 8, 12)), d.number(2, 9)
    n = d.number(5, 9) if people > 4 else d.number(2, 9)
    each = d.integer(2, n * slices // people)
    dish = d.pick(("pizzas", "pies", "cakes", "melons"))
    question = d.pick(
        (
            f"{n} {dish} are cut into {slices} slices each. {people} people eat {each} slices "
            "each. "
            f"How many slices are left?",
            f"Each of {n} {dish} has {slices} slices, and each of {people} people eats {each}. "
            f"How many slices remain?",
        )
    )
    lines = [
        f"There are {mul(n, slices)} slices.",
        f"The people eat {mul(people, each)} slices.",
        f"{sub(n * slices, people * each)} slices are left.",
    ]
    return question, lines, n * slices - people * each


def double_then_share(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    n, a = d.number(2, 6), d.integer(2, 12)
    total = n * a
    if total % 2:
        n, total = 2 * n, 2 * total
    question = d.pick(
        (
            f"{p} has {total // 2} {t}. {q} brings as many again, and they share all equally among "
            f"{n} friends. How many {t} does each friend get?",
            f"{q} doubles {p}'s {total // 2} {t}. Then {n} children share them equally. "
            f"How many {t} does each child get?",
        )
    )
    lines = [f"Doubled that is {mul(2, total // 2)} {t}.", f"Each gets {div(total, n)} {t}."]
    return question, lines, a


def spoiled_then_packed(d: Draw) -> Problem:
    p, fruit, (box, boxes) = d.person(), d.pick(words.FRUIT), d.pick(words.CONTAINERS)
    n, a, bad = d.number(2, 9), d.integer(2, 15), d.number(2, 20)
    total = n * a + bad
    question = d.pick(
        (
            f"{p} picks {total} {fruit}. {bad} are spoiled and thrown away. The rest go into "
            f"{boxes} "
            f"of {n}. How many {boxes} are filled?",
            f"Of {total} {fruit}, {bad} are bad. {p} packs the good ones, {n} to a {box}. "
            f"How many {boxes} is that?",
        )
    )
    lines = [f"{sub(total, bad)} {fruit} are good.", f"They fill {div(n * a, n)} {boxes}."]
    return question, lines, a


TRAINING = (
    share_equally, share_after_keeping, share_after_joining, boxes_shared, left_over_sharing,
    part_given, part_then_more, part_of_group, percent_of_group, recipe_scaled, teams, classes,
    tables, bus, votes, give_to_each, each_brings, pizza,
)  # fmt: skip
HELD_OUT = (double_then_share, spoiled_then_packed)
