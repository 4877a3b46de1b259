"""Things that are counted: packed, collected, given away, arranged."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import Problem
from jaxmoe.tasks.working import add, div, mul, sub


def boxes(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    a, b = d.number(2, 12), d.number(2, 40)
    question = d.pick(
        (
            f"{p} has {a} {boxes} of {t}. Each {box} holds {b} {t}. How many {t} does {p} have?",
            f"There are {b} {t} in every {box}. How many {t} are there in {a} {boxes}?",
            f"{p} fills {a} {boxes} with {b} {t} each. How many {t} is that in all?",
            f"A {box} holds {b} {t}. {p} carries {a} such {boxes}. How many {t} are these?",
        )
    )
    return question, [f"Each {box} holds {b} {t}, so {a} {boxes} hold {mul(a, b)} {t}."], a * b


def boxes_and_loose(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    a, b, c = d.number(2, 9), d.number(3, 30), d.number(2, 60)
    question = d.pick(
        (
            f"{p} has {a} {boxes} with {b} {t} in each and {c} loose {t}. "
            f"How many {t} does {p} have in all?",
            f"On a shelf there are {a} {boxes}, each with {b} {t}, and {c} more {t} beside them. "
            f"How many {t} are on the shelf?",
            f"{p} counts {c} single {t} and {a} full {boxes}. A full {box} holds {b} {t}. "
            f"What is the total number of {t}?",
        )
    )
    lines = [
        f"The {boxes} hold {mul(a, b)} {t}.",
        f"With the {c} loose ones that makes {add(a * b, c)} {t}.",
    ]
    return question, lines, a * b + c


def two_kinds_of_boxes(d: Draw) -> Problem:
    p, t, (_, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    a, b, c, e = d.number(2, 9), d.number(2, 12), d.number(2, 9), d.number(13, 30)
    question = d.pick(
        (
            f"{p} has {a} small {boxes} with {b} {t} each and {c} large {boxes} with {e} {t} each. "
            f"How many {t} are there together?",
            f"A small one of the {boxes} holds {b} {t} and a large one holds {e} {t}. How many {t} "
            f"fit into {a} small and {c} large {boxes}?",
            f"{p} packs {t}: {e} into each of {c} large {boxes}, and {b} into each of {a} small "
            f"{boxes}. How many {t} does {p} pack?",
        )
    )
    lines = [
        f"The small {boxes} hold {mul(a, b)} {t}.",
        f"The large {boxes} hold {mul(c, e)} {t}.",
        f"Together that is {add(a * b, c * e)} {t}.",
    ]
    return question, lines, a * b + c * e


def pack_exactly(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    b, q = d.number(2, 12), d.integer(2, 40)
    question = d.pick(
        (
            f"{p} packs {b * q} {t} into {boxes} of {b}. How many {boxes} does {p} fill?",
            f"Each {box} takes {b} {t}. How many {boxes} are needed for {b * q} {t}?",
            f"{b * q} {t} are put into {boxes}, {b} in each {box}. How many {boxes} are there?",
        )
    )
    return question, [f"{b} {t} go into each {box}, so {div(b * q, b)} {boxes} are filled."], q


def pack_with_rest(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    b = d.number(3, 9)
    a = d.number(2 * b, 99)
    q, r = divmod(a, b)
    wants_rest = d.chance(0.5)
    start = d.pick(
        (
            f"{p} puts {a} {t} into {boxes} that hold {b} {t} each, as many full {boxes} as "
            "possible. ",
            f"{p} has {a} {t} and fills {boxes} with {b} {t} each until there are too few left "
            "for a "
            f"full {box}. ",
        )
    )
    if wants_rest:
        question = start + f"How many {t} are left over?"
        lines = [
            f"{q} {boxes} are full, because {mul(q, b)} is the largest multiple of {b} up to {a}.",
            f"{sub(a, q * b)} {t} are left over.",
        ]
        return question, lines, r
    question = start + f"How many {boxes} are full?"
    return question, [f"The largest multiple of {b} up to {a} is {mul(q, b)}, so {q} are full."], q


def enough_boxes(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    b, q = d.number(4, 12), d.integer(2, 9)
    r = d.integer(1, b - 1)
    a = b * q + r
    question = d.pick(
        (
            f"{p} must store {a} {t}. One {box} takes at most {b} {t}. "
            f"How many {boxes} does {p} need at least?",
            f"At most {b} {t} fit into a {box}. How many {boxes} are needed so that all of {a} {t} "
            f"have a place?",
        )
    )
    lines = [
        f"{q} {boxes} take {mul(q, b)} {t}, and {sub(a, b * q)} remain.",
        f"They need one more: {add(q, 1)} {boxes}.",
    ]
    return question, lines, q + 1


def gains(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a, b, c = d.number(3, 99), d.number(2, 60), d.number(2, 60)
    question = d.pick(
        (
            f"{p} has {a} {t}. {q} gives {p.him} {b} more and {p} finds another {c}. "
            f"How many {t} does {p} have now?",
            f"{p} starts with {a} {t}, gets {b} from {q} and then buys {c}. "
            f"How many {t} does {p} have at the end?",
            f"First {p} has {a} {t}. Then {p.he} collects {b} and later {c} more. "
            f"How many {t} is that altogether?",
        )
    )
    lines = [f"First {add(a, b)} {t}.", f"Then {add(a + b, c)} {t}."]
    return question, lines, a + b + c


def losses(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a = d.number(30, 120)
    b = d.within(2, a // 2)
    c = d.within(2, a - b)
    question = d.pick(
        (
            f"{p} has {a} {t}. {p.he.capitalize()} gives {b} to {q} and loses {c}. "
            f"How many {t} are left?",
            f"Of {p}'s {a} {t}, {q} takes {b} and {c} get lost. How many does {p} still have?",
            f"{p} had {a} {t}, but {b} broke and {c} were given to {q}. How many {t} remain?",
        )
    )
    lines = [f"First {sub(a, b)} {t} are left.", f"Then {sub(a - b, c)} {t} are left."]
    return question, lines, a - b - c


def gain_and_loss(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a, b = d.number(5, 80), d.number(5, 80)
    c = d.within(2, a + b)
    question = d.pick(
        (
            f"{p} has {a} {t} and buys {b} more. Then {p.he} gives {c} to {q}. "
            f"How many {t} does {p} have left?",
            f"{p} had {a} {t}. After getting {b} more, {p.he} handed {c} of them to {q}. "
            f"How many {t} are left for {p}?",
            f"{q} gives {p} {b} {t}. {p} already had {a}. Then {p} uses {c}. How many {t} remain?",
        )
    )
    lines = [f"{p} then has {add(a, b)} {t}.", f"After that {sub(a + b, c)} {t} are left."]
    return question, lines, a + b - c


def chain_of_events(d: Draw) -> Problem:
    """Two to five events, one after the other."""
    p, t = d.person(), d.pick(words.THINGS)
    (box, _), others = d.pick(words.CONTAINERS), d.people(5)
    count = d.number(5, 60)
    sentences, lines = (
        [d.pick((f"{p} has {count} {t}.", f"There are {count} {t} in {p}'s {box}."))],
        [],
    )
    for q in others[: d.integer(2, 5)]:
        kind = d.integer(0, 9)
        if kind < 4:
            n = d.number(2, 40)
            sentences.append(
                d.pick(
                    (
                        f"{q} adds {n}.",
                        f"{p} finds {n} more.",
                        f"{q} brings {n} {t}.",
                        f"{p} buys another {n}.",
                        f"Then {q} puts in {n} more.",
                    )
                )
            )
            lines.append(f"{add(count, n)}")
            count += n
        elif kind < 8 and count > 3:
            n = d.within(2, min(count, 60))
            sentences.append(
                d.pick(
                    (
                        f"{q} takes {n}.",
                        f"{p} loses {n}.",
                        f"{p} gives {n} to {q}.",
                        f"{n} of them are sold.",
                        f"Then {q} takes away {n}.",
                    )
                )
            )
            lines.append(f"{sub(count, n)}")
            count -= n
        elif kind == 8 and count < 100:
            sentences.append(
                d.pick((f"Then the number of {t} doubles.", f"{q} doubles the number of {t}."))
            )
            lines.append(f"{mul(2, count)}")
            count *= 2
        elif count % 2 == 0:
            sentences.append(d.pick((f"{q} takes half of them.", f"Half of the {t} are sold.")))
            lines.append(f"{div(count, 2)}")
            count //= 2
    if not lines:
        n = d.number(2, 40)
        sentences.append(f"{others[0]} adds {n}.")
        lines.append(f"{add(count, n)}")
        count += n
    question = " ".join(sentences) + d.pick(
        (
            f" How many {t} are there now?",
            f" How many {t} are there in the end?",
            f" How many {t} does that leave?",
        )
    )
    return question, [f"{line} {t}." for line in lines], count


def more_than(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a, b = d.number(3, 99), d.number(2, 60)
    together = d.chance(0.5)
    question = d.pick(
        (
            f"{p} has {a} {t}. {q} has {b} more than {p}. ",
            f"{q} collected {b} more {t} than {p}, who collected {a}. ",
        )
    )
    lines = [f"{q} has {add(a, b)} {t}."]
    if together:
        question += d.pick(
            (f"How many {t} do they have together?", f"How many {t} is that for both?")
        )
        lines.append(f"Together they have {add(a, a + b)} {t}.")
        return question, lines, a + a + b
    return question + f"How many {t} does {q} have?", lines, a + b


def fewer_than(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a = d.number(10, 99)
    b = d.within(2, a - 1)
    together = d.chance(0.5)
    question = d.pick(
        (
            f"{p} has {a} {t}. {q} has {b} fewer than {p}. ",
            f"{q} has {b} {t} less than {p}. {p} has {a} {t}. ",
        )
    )
    lines = [f"{q} has {sub(a, b)} {t}."]
    if together:
        question += d.pick(
            (f"How many {t} do they have together?", f"How many {t} do both have in total?")
        )
        lines.append(f"Together they have {add(a, a - b)} {t}.")
        return question, lines, a + a - b
    return question + f"How many {t} does {q} have?", lines, a - b


def times_as_many(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    k, a = d.number(2, 6), d.number(3, 40)
    times = {2: "twice"}.get(k, f"{k} times")
    together = d.chance(0.5)
    question = d.pick(
        (
            f"{p} has {a} {t}. {q} has {times} as many. ",
            f"{q} has {times} as many {t} as {p}, who has {a}. ",
        )
    )
    lines = [f"{q} has {mul(k, a)} {t}."]
    if together:
        question += d.pick(
            (f"How many {t} do they have together?", f"How many {t} do {p} and {q} have in all?")
        )
        lines.append(f"Together they have {add(a, k * a)} {t}.")
        return question, lines, a + k * a
    return question + f"How many {t} does {q} have?", lines, k * a


def three_people(d: Draw) -> Problem:
    p, q, r = d.people(3)
    t = d.pick(words.THINGS)
    a, b, k = d.number(3, 40), d.number(2, 30), d.number(2, 4)
    times = {2: "twice"}.get(k, f"{k} times")
    question = d.pick(
        (
            f"{p} has {a} {t}. {q} has {b} more than {p}, and {r} has {times} as many as {q}. "
            f"How many {t} do the three have together?",
            f"{r} has {times} as many {t} as {q}, {q} has {b} more than {p}, and {p} has {a}. "
            f"How many {t} are there in all?",
        )
    )
    lines = [
        f"{q} has {add(a, b)} {t}.",
        f"{r} has {mul(k, a + b)} {t}.",
        f"Together they have {add(a, a + b, k * (a + b))} {t}.",
    ]
    return question, lines, a + (a + b) + k * (a + b)


def difference(d: Draw) -> Problem:
    p, q, t = *d.people(2), d.pick(words.THINGS)
    a, b = d.number(2, 120), d.number(2, 120)
    if a == b:
        a += 1
    more, less = (p, q) if a > b else (q, p)
    question = d.pick(
        (
            f"{p} has {a} {t} and {q} has {b}. How many more {t} does {more} have than {less}?",
            f"{p} found {a} {t}, {q} found {b}. How many fewer did {less} find?",
            f"What is the difference between {p}'s {a} {t} and {q}'s {b} {t}?",
        )
    )
    high, low = max(a, b), min(a, b)
    return question, [f"{more} has {sub(high, low)} {t} more than {less}."], high - low


def rows(d: Draw) -> Problem:
    a, b = d.number(3, 20), d.number(3, 30)
    thing, place = d.pick(
        (
            ("chairs", "hall"), ("desks", "classroom"), ("trees", "orchard"), ("tulips", "garden"),
            ("cabbages", "field"), ("tiles", "kitchen"), ("seats", "theatre"), ("tents", "camp"),
            ("bricks", "wall"), ("lamps", "station"),
        )
    )  # fmt: skip
    question = d.pick(
        (
            f"The {thing} in the {place} stand in {a} rows of {b}. How many {thing} are there?",
            f"There are {a} rows of {thing} in the {place} with {b} {thing} in each row. "
            f"How many {thing} are there in all?",
        )
    )
    lines = [f"Each row has {b} {thing}, so {a} rows have {mul(a, b)} {thing}."]
    return question, lines, a * b


def rows_with_gaps(d: Draw) -> Problem:
    a, b = d.number(3, 12), d.number(3, 20)
    c = d.within(2, a * b - 1)
    thing, place, gone = d.pick(
        (
            ("seats", "cinema", "are taken"), ("chairs", "hall", "are broken"),
            ("places", "car park", "are in use"), ("tulips", "garden", "have not opened"),
            ("beds", "hospital", "are occupied"), ("desks", "school", "are used"),
        )
    )  # fmt: skip
    question = d.pick(
        (
            f"The {place} has {a} rows of {b} {thing}. {c} of the {thing} {gone}. "
            f"How many other {thing} are there?",
            f"There are {a} rows with {b} {thing} each in the {place}, and {c} {thing} {gone}. "
            f"How many {thing} does that leave?",
        )
    )
    lines = [f"In all there are {mul(a, b)} {thing}.", f"{sub(a * b, c)} {thing} are left."]
    return question, lines, a * b - c


def legs(d: Draw) -> Problem:
    two, four = (
        d.pick(("hens", "ducks", "geese", "swans")),
        d.pick(("cows", "goats", "sheep", "pigs")),
    )
    a, b = d.number(2, 30), d.number(2, 20)
    question = d.pick(
        (
            f"On a farm there are {a} {two} and {b} {four}. How many legs do they have in all?",
            f"A farmer has {b} {four} and {a} {two}. How many legs is that together?",
        )
    )
    lines = [
        f"The {two} have 2 legs each: {mul(a, 2)}.",
        f"The {four} have 4 legs each: {mul(b, 4)}.",
        f"Together that is {add(a * 2, b * 4)} legs.",
    ]
    return question, lines, a * 2 + b * 4


def wheels(d: Draw) -> Problem:
    a, b, c = d.number(2, 20), d.number(2, 9), d.number(2, 20)
    question = d.pick(
        (
            f"A yard holds {a} bicycles, {b} tricycles and {c} cars. How many wheels are there?",
            f"How many wheels do {a} bicycles, {b} tricycles and {c} cars have together?",
        )
    )
    lines = [
        f"Bicycles: {mul(a, 2)} wheels.",
        f"Tricycles: {mul(b, 3)} wheels.",
        f"Cars: {mul(c, 4)} wheels.",
        f"Together {add(a * 2, b * 3, c * 4)} wheels.",
    ]
    return question, lines, a * 2 + b * 3 + c * 4


def colours(d: Draw) -> Problem:
    t, (x, y, z) = d.pick(words.THINGS), d.sample(words.COLOURS, 3)
    a, b, c = d.number(2, 50), d.number(2, 50), d.number(2, 50)
    total = a + b + c
    question = d.pick(
        (
            f"A jar holds {total} {t}: {a} are {x}, {b} are {y} and the rest are {z}. "
            f"How many {t} are {z}?",
            f"Of {total} {t} {a} are {x} and {b} are {y}. The others are {z}. How many are {z}?",
        )
    )
    lines = [f"{add(a, b)} {t} are {x} or {y}.", f"{sub(total, a + b)} {t} are {z}."]
    return question, lines, c


def collection_over_days(d: Draw) -> Problem:
    p, t, days = d.person(), d.pick(words.THINGS), d.sample(words.DAYS, 3)
    a, b, k = d.number(3, 40), d.number(2, 20), d.number(2, 3)
    times = {2: "twice", 3: "three times"}[k]
    question = d.pick(
        (
            f"On {days[0]} {p} collects {a} {t}, on {days[1]} {times} as many and on {days[2]} "
            f"{b}. "
            f"How many {t} does {p} collect in all?",
            f"{p} picked up {a} {t} on {days[0]}, {times} that number on {days[1]} and {b} on "
            f"{days[2]}. How many {t} is that together?",
        )
    )
    lines = [
        f"On {days[1]} it was {mul(k, a)} {t}.",
        f"Together that is {add(a, k * a, b)} {t}.",
    ]
    return question, lines, a + k * a + b


def stickers_per_page(d: Draw) -> Problem:
    p = d.person()
    what, page = d.pick(
        (("stickers", "page"), ("photos", "page"), ("stamps", "sheet"), ("drawings", "wall"),
         ("postcards", "board"), ("magnets", "door"))
    )  # fmt: skip
    a, b = d.number(3, 12), d.number(4, 15)
    c = d.within(2, min(a * b - 1, 30))
    question = d.pick(
        (
            f"{p} has {a} {page}s for {what}, with room for {b} on each {page}. {c} places are "
            "still "
            f"empty. How many {what} does {p} have?",
            f"Each of {p}'s {a} {page}s takes {b} {what}, and {c} places are free. "
            f"How many {what} are there already?",
        )
    )
    lines = [f"There is room for {mul(a, b)} {what}.", f"{sub(a * b, c)} places are filled."]
    return question, lines, a * b - c


def eggs(d: Draw) -> Problem:
    p = d.person()
    a, days = d.number(4, 20), d.number(2, 9)
    b = d.within(2, a * days // 2)
    question = d.pick(
        (
            f"{p}'s hens lay {a} eggs a day. In {days} days {p} uses {b} eggs for cakes. "
            f"How many eggs are left from these days?",
            f"Every day {p} collects {a} eggs. After {days} days {p.he} sells {b} of them. "
            f"How many eggs remain?",
        )
    )
    lines = [f"In {days} days that is {mul(a, days)} eggs.", f"{sub(a * days, b)} eggs are left."]
    return question, lines, a * days - b


def unpack_and_regroup(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    b, q = d.number(2, 9), d.integer(2, 6)
    a = d.number(2, 6)
    # a boxes of b*q are regrouped by b
    question = d.pick(
        (
            f"{p} empties {a} {boxes} with {b * q} {t} each and makes bundles of {b}. "
            f"How many bundles does {p} make?",
            f"The {t} of {a} {boxes}, {b * q} in each {box}, are tied into bundles of {b}. "
            f"How many bundles are there?",
        )
    )
    lines = [
        f"The {boxes} hold {mul(a, b * q)} {t}.",
        f"That makes {div(a * b * q, b)} bundles.",
    ]
    return question, lines, a * q


def still_missing(d: Draw) -> Problem:
    p, t = d.person(), d.pick(words.THINGS)
    a, b, k = d.number(4, 30), d.number(3, 30), d.number(2, 3)
    goal = a + k * b + d.integer(2, 50)
    question = d.pick(
        (
            f"{p} wants {goal} {t}. {p.he.capitalize()} has {a}, and {k} friends bring {b} each. "
            f"How many {t} are still missing?",
            f"For a party {goal} {t} are needed. {p} has {a} and {k} guests bring {b} each. "
            f"How many {t} must still be found?",
        )
    )
    lines = [
        f"The others bring {mul(k, b)} {t}.",
        f"With {p}'s own that is {add(k * b, a)} {t}.",
        f"{sub(goal, k * b + a)} {t} are missing.",
    ]
    return question, lines, goal - k * b - a


def shelves(d: Draw) -> Problem:
    p = d.person()
    a, b, c = d.number(2, 9), d.number(5, 30), d.number(2, 5)
    question = d.pick(
        (
            f"{p}'s bookcase has {a} shelves with {b} books each. {p} takes {c} books from every "
            f"shelf. How many books are left in the bookcase?",
            f"There are {b} books on each of {a} shelves. {p} lends out {c} books from each shelf. "
            f"How many books remain?",
        )
    )
    lines = [
        f"Each shelf keeps {sub(b, c)} books.",
        f"{a} shelves keep {mul(a, b - c)} books.",
    ]
    return question, lines, a * (b - c)


def beads(d: Draw) -> Problem:
    p, (x, y) = d.person(), d.sample(words.COLOURS, 2)
    a, b, n = d.number(2, 12), d.number(2, 12), d.number(2, 9)
    question = d.pick(
        (
            f"A necklace needs {a} {x} and {b} {y} beads. How many beads does {p} need for {n} "
            f"necklaces?",
            f"{p} makes {n} necklaces. Each has {a} {x} beads and {b} {y} beads. "
            f"How many beads is that?",
        )
    )
    lines = [f"One necklace has {add(a, b)} beads.", f"{n} have {mul(n, a + b)} beads."]
    return question, lines, n * (a + b)


def jars_emptied(d: Draw) -> Problem:
    p, t, (box, boxes) = d.person(), d.pick(words.THINGS), d.pick(words.CONTAINERS)
    a, b = d.number(3, 9), d.number(3, 20)
    c = d.within(2, a - 1)
    question = d.pick(
        (
            f"{p} has {a} {boxes} of {b} {t}. {c} of the {boxes} are given away. "
            f"How many {t} does {p} keep?",
            f"There are {b} {t} in each {box}. Of {a} {boxes}, {p} gives away {c}. "
            f"How many {t} stay with {p}?",
        )
    )
    lines = [f"{sub(a, c)} {boxes} are left.", f"They hold {mul(a - c, b)} {t}."]
    return question, lines, (a - c) * b


TRAINING = (
    boxes, boxes_and_loose, two_kinds_of_boxes, pack_exactly, pack_with_rest, enough_boxes, gains,
    losses, gain_and_loss, chain_of_events, chain_of_events, chain_of_events, more_than, fewer_than,
    times_as_many, three_people, difference, rows, rows_with_gaps, legs, wheels, colours,
    collection_over_days, stickers_per_page, eggs, still_missing, shelves,
)  # fmt: skip
HELD_OUT = (unpack_and_regroup, beads, jars_emptied)
