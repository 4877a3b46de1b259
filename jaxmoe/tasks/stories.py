"""Short stories of a small world, with a question whose answer the world itself gives.

A story is a list of sentences; the answer is one word, name or number. The line of reasoning names
what in the story decides.
"""

import itertools
from collections.abc import Callable

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw, Person


Story = tuple[str, list[str], str]

_OPENINGS = (
    "It was a quiet morning.", "The sun was shining.", "It was a rainy day.", "It was late.",
    "Everybody was at home.", "The holidays had begun.", "It was a windy afternoon.",
    "Snow lay on the roofs.", "The day began early.", "Nobody was in a hurry.",
    "The birds were singing.", "It was market day.",
)  # fmt: skip
_ASIDES = (
    "A bell rang somewhere.", "It began to rain.", "A dog barked.", "The clock struck.",
    "Everyone laughed.", "Nobody said a word.", "The wind blew.", "The tea was ready.",
    "A door closed.", "The radio played a song.", "Somebody sang.", "The cat slept.",
)  # fmt: skip


def make(draw: Draw, *, held_out: bool = False) -> Story:
    """Question (the story and what is asked), lines of reasoning, answer."""
    return draw.pick(HELD_OUT if held_out else TRAINING)(draw)


def _tell(d: Draw, sentences: list[str], question: str) -> str:
    """Puts the story together, with what is beside the point here and there."""
    told = [d.pick(_OPENINGS)] if d.chance(0.5) else []
    for sentence in sentences:
        told.append(sentence)
        if d.chance(0.1):
            told.append(d.pick(_ASIDES))
    return " ".join(told) + d.pick((" ", "\n")) + question


def _a(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def carried(d: Draw) -> Story:
    """Things are taken along from place to place."""
    people, places = d.people(d.integer(2, 3)), d.sample(words.PLACES, d.integer(3, 5))
    things = d.sample(words.OBJECTS, d.integer(1, 2))
    where_person = {p: d.pick(places) for p in people}
    where_thing = {o: d.pick(places) for o in things}
    mover = dict.fromkeys(things, "")
    sentences = [
        d.pick((f"{p} was in the {where_person[p]}.", f"{p} sat in the {where_person[p]}."))
        for p in people
    ]
    sentences += [
        d.pick((f"The {o} was in the {where_thing[o]}.", f"The {o} lay in the {where_thing[o]}."))
        for o in things
    ]
    for _ in range(d.integer(2, 4)):
        p, o = d.pick(people), d.pick(things)
        goal = d.pick([place for place in places if place != where_thing[o]])
        if d.chance(0.3):
            goal = d.pick([place for place in places if place != where_person[p]])
            sentences.append(
                d.pick((f"{p} went to the {goal}.", f"{p} walked over to the {goal}."))
            )
            where_person[p] = goal
            continue
        if where_person[p] != where_thing[o]:
            sentences.append(f"{p} went to the {where_thing[o]}.")
        sentences.append(
            d.pick(
                (
                    f"{p} carried the {o} to the {goal}.",
                    f"{p} took the {o} to the {goal}.",
                    f"{p} brought the {o} to the {goal} and left it there.",
                )
            )
        )
        where_person[p] = where_thing[o] = goal
        mover[o] = p
    if d.chance(0.6):
        o = d.pick(things)
        question = d.pick(
            (
                f"Where is the {o}?",
                f"Where is the {o} now?",
                f"In which place is the {o} in the end?",
            )
        )
        if mover[o]:
            line = f"{mover[o]} was the last to move the {o}, to the {where_thing[o]}."
        else:
            line = f"Nobody moved the {o}. It was in the {where_thing[o]}."
        return _tell(d, sentences, question), [line], where_thing[o]
    p = d.pick(people)
    question = d.pick((f"Where is {p}?", f"Where is {p} now?", f"Where is {p} at the end?"))
    line = f"{p} was last in the {where_person[p]}."
    return _tell(d, sentences, question), [line], where_person[p]


def handed_on(d: Draw) -> Story:
    """Things go from hand to hand."""
    people = d.people(d.integer(3, 5))
    things = d.sample(words.OBJECTS, 2)
    owners = {o: [p] for o, p in zip(things, d.sample(people, 2), strict=True)}
    sentences = [
        d.pick((f"{owners[o][0]} had the {o}.", f"{owners[o][0]} found the {o}."))
        for o in things
    ]  # fmt: skip
    for _ in range(d.integer(2, 5)):
        o = d.pick(things)
        p = owners[o][-1]
        q = d.pick([other for other in people if other != p])
        sentences.append(
            d.pick(
                (
                    f"{p} gave the {o} to {q}.",
                    f"{p} handed the {o} to {q}.",
                    f"{q} got the {o} from {p}.",
                    f"{p} passed {q} the {o}.",
                )
            )
        )
        owners[o].append(q)
    o = d.pick(things)
    trail = f"The {o} went from " + " to ".join(owners[o]) + "."
    if len(owners[o]) == 1:
        trail = f"Only {owners[o][0]} had the {o}."
    kind = d.integer(0, 3)
    if kind == 0:
        question = d.pick((f"Who had the {o} first?", f"Who had the {o} at the beginning?"))
        return _tell(d, sentences, question), [trail], owners[o][0]
    if kind == 1:
        times = len(owners[o]) - 1
        trail += f" It was handed on {times} times." if times != 1 else " It was handed on 1 time."
        question = f"How many times was the {o} handed on?"
        return _tell(d, sentences, question), [trail], str(times)
    question = d.pick(
        (f"Who has the {o} now?", f"Who has the {o} in the end?", f"Who has the {o}?")
    )
    return _tell(d, sentences, question), [trail], owners[o][-1]


def race(d: Draw) -> Story:
    """Who came in after whom."""
    people = d.people(d.integer(3, 5))
    event = d.pick(("race", "swimming race", "boat race", "bicycle race", "sack race"))
    place = d.pick(words.PLACES)
    sentences = [d.pick((f"There was a {event} in the {place}.", f"They held a {event}."))]
    sentences.append(d.pick((f"{people[0]} won the {event}.", f"{people[0]} came in first.")))
    for before, after in itertools.pairwise(people):
        sentences.append(
            d.pick(
                (
                    f"{after} came in right after {before}.",
                    f"{after} followed {before}.",
                    f"Next after {before} was {after}.",
                )
            )
        )
    return _asked_of_order(d, sentences, people, ("came in", "finished"))


def arrivals(d: Draw) -> Story:
    """The same with guests, told from the other end."""
    people = d.people(d.integer(3, 5))
    place = d.pick(words.PLACES)
    sentences = [d.pick((f"They met in the {place}.", f"There was a party in the {place}."))]
    later = []
    for before, after in itertools.pairwise(people):
        later.append(
            d.pick(
                (
                    f"{before} arrived just before {after}.",
                    f"{after} arrived just after {before}.",
                )
            )
        )
    if d.chance(0.5):
        later.reverse()
    return _asked_of_order(d, sentences + later, people, ("arrived", "came"))


def _asked_of_order(
    d: Draw, sentences: list[str], people: list[Person], verbs: tuple[str, ...]
) -> Story:
    line = "In order: " + ", ".join(people) + "."
    verb = d.pick(verbs)
    kind = d.integer(0, 4)
    if kind == 4:
        place = d.integer(0, len(people) - 2)
        question = f"Who {verb} right after {people[place]}?"
        return _tell(d, sentences, question), [line], people[place + 1]
    place = (0, 1, 2, len(people) - 1)[kind]
    word = ("first", "second", "third", "last")[kind]
    question = f"Who {verb} {word}?"
    return _tell(d, sentences, question), [line], people[place]


def taller(d: Draw) -> Story:
    """Comparisons that make a chain, in any order."""
    people = d.people(d.integer(3, 4))
    more, most, least = d.pick(
        (
            ("taller", "tallest", "shortest"), ("older", "oldest", "youngest"),
            ("faster", "fastest", "slowest"), ("stronger", "strongest", "weakest"),
            ("richer", "richest", "poorest"), ("louder", "loudest", "quietest"),
        )
    )  # fmt: skip
    sentences = [f"{p} is {more} than {q}." for p, q in itertools.pairwise(people)]
    if d.chance(0.5):
        d.shuffle(sentences)
    line = f"From the {most} to the {least}: " + ", ".join(people) + "."
    if d.chance(0.5):
        return _tell(d, sentences, f"Who is the {most}?"), [line], people[0]
    return _tell(d, sentences, f"Who is the {least}?"), [line], people[-1]


def coloured_things(d: Draw) -> Story:
    """Who wears or has what in which colour, and one change."""
    people = d.people(d.integer(3, 4))
    things = d.sample(("hat", "coat", "scarf", "bag", "kite", "cup"), 2)
    colour = {}
    # Every colour once for each kind of thing, so that "who" has one answer.
    for o in things:
        for p, c in zip(people, d.sample(words.COLOURS, len(people)), strict=True):
            colour[p, o] = c
    sentences = []
    for p in people:
        x, y = (things[0], things[1]) if d.chance(0.5) else (things[1], things[0])
        sentences.append(
            d.pick(
                (
                    f"{p} has {_a(colour[p, x])} {x} and {_a(colour[p, y])} {y}.",
                    f"{p}'s {x} is {colour[p, x]} and {p.his} {y} is {colour[p, y]}.",
                    f"The {x} of {p} is {colour[p, x]}. The {y} of {p} is {colour[p, y]}.",
                )
            )
        )
    p, o = d.pick(people), d.pick(things)
    if d.chance(0.3):
        old = colour[p, o]
        taken = {colour[q, o] for q in people}
        colour[p, o] = d.pick([c for c in words.COLOURS if c not in taken])
        verb = "paints" if o in ("kite", "cup") else "dyes"
        sentences.append(f"{p} {verb} {p.his} {o} {colour[p, o]}.")
        if d.chance(0.5):
            line = f"{p}'s {o} was {old} and is now {colour[p, o]}."
            question = d.pick(
                (f"What colour is {p}'s {o} now?", f"Which colour has {p}'s {o} now?")
            )
            return _tell(d, sentences, question), [line], colour[p, o]
    p, o = d.pick(people), d.pick(things)
    line = f"{p}'s {o} is {colour[p, o]}."
    if d.chance(0.5):
        question = d.pick((f"What colour is {p}'s {o}?", f"Which colour has {p}'s {o}?"))
        return _tell(d, sentences, question), [line], colour[p, o]
    question = d.pick((f"Who has the {colour[p, o]} {o}?", f"Whose {o} is {colour[p, o]}?"))
    return _tell(d, sentences, question), [line], str(p)


_DEEDS = (
    ("swam in", "lake"), ("baked in", "kitchen"), ("read in", "library"), ("played in", "park"),
    ("worked in", "garden"), ("painted in", "studio"), ("slept in", "attic"),
    ("danced in", "hall"), ("rode in", "forest"), ("sang in", "church"), ("cooked in", "yard"),
    ("studied in", "museum"), ("rowed in", "harbour"), ("sewed in", "workshop"),
    ("trained in", "gym"), ("walked in", "meadow"),
)  # fmt: skip


def week(d: Draw) -> Story:
    """What was done on which day."""
    start, count = d.integer(0, 2), d.integer(3, 5)
    days = list(words.DAYS[start : start + count])
    p = d.person()
    deeds = d.sample(_DEEDS, count)
    told = list(zip(days, deeds, strict=True))
    if d.chance(0.3):
        d.shuffle(told)
    sentences = [
        d.pick((f"On {day} {p} {deed} the {place}.", f"{p} {deed} the {place} on {day}."))
        for day, (deed, place) in told
    ]
    day, (deed, place) = d.pick(told)
    line = f"On {day} {p} {deed} the {place}."
    kind = d.integer(0, 2)
    if kind == 0:
        question = d.pick((f"Where was {p} on {day}?", f"In which place was {p} on {day}?"))
        return _tell(d, sentences, question), [line], place
    if kind == 1:
        question = d.pick(
            (f"On which day was {p} in the {place}?", f"When was {p} in the {place}?")
        )
        return _tell(d, sentences, question), [line], day
    position = d.integer(1, count - 1)
    before, (_, goal) = days[position - 1], deeds[position]
    question = f"Where was {p} on the day after {before}?"
    line = f"The day after {before} is {days[position]}. On {days[position]} {p} was in the {goal}."
    return _tell(d, sentences, question), [line], goal


def pets(d: Draw) -> Story:
    """Animals, their names and their people."""
    people = d.people(3)
    animals = d.sample(words.ANIMALS, 3)
    names = d.sample(("Rex", "Bix", "Dot", "Pip", "Momo", "Zuzu", "Tick", "Bobo", "Fay", "Gus",
                      "Kiki", "Lulu"), 3)  # fmt: skip
    sentences = []
    for p, a, n in zip(people, animals, names, strict=True):
        sentences.append(
            d.pick(
                (
                    f"{p} has {_a(a)} called {n}.",
                    f"{n} is {p}'s {a}.",
                    f"{p}'s {a} is called {n}.",
                )
            )
        )
    which = d.integer(0, 2)
    p, a, n = people[which], animals[which], names[which]
    line = f"{p} has the {a}, and it is called {n}."
    food = d.pick(("slept in the sun", "wanted food", "ran away", "came back", "made a noise"))
    sentences.append(f"{n} {food}.")
    kind = d.integer(0, 4)
    question, answer = (
        (f"What is the name of {p}'s {a}?", n),
        (f"Whose animal is {n}?", str(p)),
        (f"What kind of animal is {n}?", a),
        (f"Who has the {a}?", str(p)),
        (f"Whose animal {food}?", str(p)),
    )[kind]
    return _tell(d, sentences, question), [line], answer


def head_count(d: Draw) -> Story:
    """People come into a room and leave it."""
    people, place = d.people(d.integer(4, 6)), d.pick(words.PLACES)
    inside: list[Person] = list(people[:2])
    lines = [f"{people[0]} and {people[1]}: 2."]
    sentences = [f"{people[0]} and {people[1]} were in the {place}."]
    outside = list(people[2:])
    for _ in range(d.integer(2, 5)):
        if outside and (len(inside) < 2 or d.chance(0.6)):
            p = outside.pop(0)
            inside.append(p)
            sentences.append(d.pick((f"{p} came in.", f"{p} joined them.", f"{p} walked in.")))
            lines.append(f"{p} comes: {len(inside)}.")
        elif inside:
            p = d.pick(inside)
            inside.remove(p)
            outside.append(p)
            sentences.append(d.pick((f"{p} left.", f"{p} went out.", f"{p} went home.")))
            lines.append(f"{p} goes: {len(inside)}.")
    if d.chance(0.6):
        question = d.pick(
            (f"How many people are in the {place} now?", f"How many are left in the {place}?")
        )
        return _tell(d, sentences, question), [" ".join(lines)], str(len(inside))
    p = d.pick(people[:3])
    answer = "yes" if p in inside else "no"
    question = d.pick((f"Is {p} in the {place} now?", f"Is {p} still in the {place}?"))
    order = [s for s in sentences if p in s]
    line = order[-1] if order else f"{p} never came."
    return _tell(d, sentences, question), [line], answer


def hidden_in(d: Draw) -> Story:
    """A thing in a thing in a place."""
    small = ("ring", "coin", "key", "letter", "shell", "stamp", "pearl", "ticket")
    thing, other = d.sample(small, 2)
    inner = d.pick(("tin", "box", "jar", "case", "purse", "cup"))
    outer = d.pick(("bag", "drawer", "basket", "chest", "trunk", "cupboard"))
    place, elsewhere = d.sample(words.PLACES, 2)
    p, q = d.people(2)
    facts = [
        d.pick(
            (f"{p} put the {thing} into the {inner}.", f"The {thing} was put into the {inner}.")
        ),
        d.pick((f"The {inner} stood in the {outer}.", f"{p} set the {inner} into the {outer}.")),
        d.pick((f"The {outer} was in the {place}.", f"{q} kept the {outer} in the {place}.")),
        f"The {other} was in the {elsewhere}.",
    ]
    if d.chance(0.4):
        d.shuffle(facts)
    if d.chance(0.3):
        new = d.pick([place_ for place_ in words.PLACES if place_ not in (place, elsewhere)])
        facts.append(f"{q} moved the {outer} to the {new}.")
        place = new
    if d.chance(0.25):
        line = f"The {other} was in the {elsewhere}."
        return _tell(d, facts, f"In which place is the {other}?"), [line], elsewhere
    line = (
        f"The {thing} is in the {inner}, the {inner} is in the {outer}, "
        f"the {outer} is in the {place}."
    )
    question = d.pick(
        (f"In which place is the {thing}?", f"Where must one go to find the {thing}?")
    )
    return _tell(d, facts, question), [line], place


def bought(d: Draw) -> Story:
    """Who bought what where."""
    people = d.people(d.integer(3, 4))
    shops, things = d.sample(words.SHOPS, len(people)), d.sample(words.OBJECTS, len(people))
    verbs = d.pick((("bought", "buy"), ("found", "find"), ("sold", "sell"), ("saw", "see")))
    sentences = []
    for p, s, o in zip(people, shops, things, strict=True):
        sentences.append(
            d.pick(
                (
                    f"{p} {verbs[0]} the {o} at the {s}.",
                    f"At the {s} {p} {verbs[0]} the {o}.",
                    f"{p} went to the {s} and {verbs[0]} the {o}.",
                )
            )
        )
    which = d.integer(0, len(people) - 1)
    p, o = people[which], things[which]
    line = f"{p} {verbs[0]} the {o} at the {shops[which]}."
    kind = d.integer(0, 2)
    question, answer = (
        (f"Who {verbs[0]} the {o}?", str(p)),
        (f"What did {p} {verbs[1]}?", o),
        (f"Who was at the {shops[which]}?", str(p)),
    )[kind]
    return _tell(d, sentences, question), [line], answer


def shelf(d: Draw) -> Story:
    """Things in a row."""
    things = d.sample(words.OBJECTS, d.integer(3, 5))
    p, q = d.people(2)
    sentences = [d.pick((f"{p} put things on a shelf.", f"{q} looked at {p}'s shelf.")),
                 f"On the far left was the {things[0]}."]  # fmt: skip
    for left, right in itertools.pairwise(things):
        sentences.append(
            d.pick(
                (
                    f"Right of the {left} was the {right}.",
                    f"The {right} stood next, right of the {left}.",
                )
            )
        )
    line = f"From left to right: {', '.join(things)}. That is {len(things)} things."
    place = d.integer(0, len(things) - 2)
    kind = d.integer(0, 3)
    question, answer = (
        ("What was on the far right?", things[-1]),
        (f"What was just left of the {things[place + 1]}?", things[place]),
        (f"What was just right of the {things[place]}?", things[place + 1]),
        ("How many things were on the shelf?", str(len(things))),
    )[kind]
    return _tell(d, sentences, question), [line], answer


def jobs(d: Draw) -> Story:
    """Jobs, given to people and traded."""
    people = d.people(3)
    tasks = d.sample(("cook", "sweep", "shop", "paint", "sing", "dig", "write", "drive", "sew",
                      "row", "count", "wash"), 3)  # fmt: skip
    task = dict(zip(people, tasks, strict=True))
    sentences = [d.pick((f"{p} was to {task[p]}.", f"{p} had to {task[p]}.")) for p in people]
    lines = [", ".join(f"{p}: {task[p]}" for p in people) + "."]
    for _ in range(d.integer(1, 2)):
        p, q = d.sample(people, 2)
        sentences.append(d.pick((f"{p} and {q} changed places.", f"{p} traded jobs with {q}.")))
        task[p], task[q] = task[q], task[p]
        lines.append(", ".join(f"{p}: {task[p]}" for p in people) + ".")
    p = d.pick(people)
    if d.chance(0.5):
        question = d.pick((f"What is {p}'s job now?", f"What must {p} do now?"))
        return _tell(d, sentences, question), lines, task[p]
    return _tell(d, sentences, f"Who must {task[p]} now?"), lines, str(p)


def seats_swapped(d: Draw) -> Story:
    """Held out: like `jobs`, with places."""
    people = d.people(3)
    places = d.sample(("window", "door", "stove", "stage", "wall", "fire"), 3)
    seat = dict(zip(people, places, strict=True))
    sentences = [f"{p} sat by the {seat[p]}." for p in people]
    lines = [", ".join(f"{p}: {seat[p]}" for p in people) + "."]
    for _ in range(d.integer(1, 2)):
        p, q = d.sample(people, 2)
        sentences.append(f"{p} and {q} changed places.")
        seat[p], seat[q] = seat[q], seat[p]
        lines.append(", ".join(f"{p}: {seat[p]}" for p in people) + ".")
    p = d.pick(people)
    if d.chance(0.5):
        return _tell(d, sentences, f"By what does {p} sit now?"), lines, seat[p]
    return _tell(d, sentences, f"Who sits by the {seat[p]} now?"), lines, str(p)


def borrowed(d: Draw) -> Story:
    """Held out: like `handed_on`, with lending and returning."""
    people = d.people(3)
    o = d.pick(words.OBJECTS)
    trail = [people[0]]
    sentences = [f"The {o} belonged to {people[0]}."]
    for _ in range(d.integer(2, 4)):
        q = d.pick([other for other in people if other != trail[-1]])
        sentences.append(
            d.pick((f"{trail[-1]} lent the {o} to {q}.", f"{q} borrowed the {o} from {trail[-1]}."))
        )
        trail.append(q)
    line = f"The {o} went from " + " to ".join(trail) + "."
    if d.chance(0.3):
        return _tell(d, sentences, f"Who had the {o} at the beginning?"), [line], trail[0]
    question = d.pick((f"Who has the {o} now?", f"Who has the {o} in the end?"))
    return _tell(d, sentences, question), [line], trail[-1]


def appointments(d: Draw) -> Story:
    """Held out: like `week`, with several people."""
    people = d.people(3)
    days, places = d.sample(words.DAYS, 3), d.sample(words.PLACES, 3)
    told = list(zip(people, days, places, strict=True))
    sentences = [
        d.pick((f"{p} will be in the {s} on {day}.", f"On {day} {p} goes to the {s}."))
        for p, day, s in told
    ]
    p, day, place = d.pick(told)
    line = f"On {day} {p} goes to the {place}."
    kind = d.integer(0, 2)
    question, answer = (
        (f"On which day is {p} in the {place}?", day),
        (f"Who goes to the {place}?", str(p)),
        (f"Where is {p} on {day}?", place),
    )[kind]
    return _tell(d, sentences, question), [line], answer


TRAINING: tuple[Callable[[Draw], Story], ...] = (
    carried, carried, carried, handed_on, handed_on, race, arrivals, taller, coloured_things, week,
    pets, head_count, hidden_in, bought, shelf, jobs,
)  # fmt: skip
HELD_OUT: tuple[Callable[[Draw], Story], ...] = (seats_swapped, borrowed, appointments)
