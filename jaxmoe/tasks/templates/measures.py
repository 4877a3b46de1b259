"""Lengths, weights, areas, ages and other measured things."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import Problem
from jaxmoe.tasks.working import add, div, mul, sub


def rectangle_area(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("garden", "room", "field", "carpet", "wall", "yard", "stage", "roof"))
    a, b = d.number(2, 30), d.number(2, 12)
    question = d.pick(
        (
            f"A {thing} is {a} m long and {b} m wide. What is its area in square metres?",
            f"{p}'s {thing} measures {a} m by {b} m. How many square metres is that?",
        )
    )
    return question, [f"The area is {mul(a, b)} square metres."], a * b


def fence(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("garden", "field", "meadow", "yard", "park", "pond"))
    a, b = d.number(2, 60), d.number(2, 40)
    question = d.pick(
        (
            f"A {thing} is {a} m long and {b} m wide. How many metres of fence go all around it?",
            f"{p} puts a fence around a {thing} of {a} m by {b} m. How long is the fence in "
            "metres?",
        )
    )
    lines = [
        f"Length and width together are {add(a, b)} m.",
        f"All around it is {mul(2, a + b)} m.",
    ]
    return question, lines, 2 * (a + b)


def fence_cost(d: Draw) -> Problem:
    p = d.person()
    a, b, c = d.number(2, 15), d.number(2, 12), d.number(2, 9)
    thing = d.pick(("garden", "field", "meadow", "yard"))
    question = d.pick(
        (
            f"{p} fences a {thing} of {a} m by {b} m. A metre of fence costs ${c}. "
            f"How many dollars does the whole fence cost?",
            f"A {thing} is {a} m long and {b} m wide. What does a fence all around cost at ${c} a "
            f"metre?",
        )
    )
    lines = [
        f"Length and width together are {add(a, b)} m.",
        f"The fence is {mul(2, a + b)} m long.",
        f"It costs {mul(c, 2 * (a + b))} dollars.",
    ]
    return question, lines, c * 2 * (a + b)


def area_cost(d: Draw) -> Problem:
    p = d.person()
    a, b, c = d.number(2, 12), d.number(2, 9), d.number(2, 9)
    cover, place = d.pick(
        (("carpet", "floor"), ("paint", "wall"), ("turf", "lawn"), ("tiles", "floor"))
    )
    question = d.pick(
        (
            f"The {place} is {a} m by {b} m. The {cover} for one square metre costs ${c}. "
            f"What does {p} pay for the whole {place}?",
            f"{p} buys {cover} for a {place} of {a} m by {b} m at ${c} a square metre. "
            f"How many dollars is that?",
        )
    )
    lines = [f"The area is {mul(a, b)} square metres.", f"It costs {mul(c, a * b)} dollars."]
    return question, lines, a * b * c


def square_side(d: Draw) -> Problem:
    a = d.integer(2, 60)
    thing = d.pick(("garden", "tile", "table", "field", "window", "stamp"))
    unit = d.pick(("m", "cm"))
    question = d.pick(
        (
            f"All around a square {thing} it is {4 * a} {unit}. How long is one side in {unit}?",
            f"The four sides of a square {thing} are {4 * a} {unit} together. "
            f"How many {unit} is each side?",
        )
    )
    return question, [f"Four equal sides: {div(4 * a, 4)} {unit}."], a


def cut_rope(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("rope", "ribbon", "board", "wire", "pipe", "hose", "thread"))
    b, q = d.number(2, 12), d.integer(2, 15)
    rest = d.integer(0, b - 1)
    total = b * q + rest
    wants_rest = d.chance(0.4)
    question = d.pick(
        (
            f"{p} cuts a {thing} of {total} cm into pieces of {b} cm. ",
            f"Pieces of {b} cm are cut from a {thing} of {total} cm. ",
        )
    )
    if wants_rest:
        question += "How many cm are left over?"
        lines = [f"{q} pieces take {mul(q, b)} cm.", f"{sub(total, q * b)} cm are left over."]
        return question, lines, rest
    question += "How many whole pieces are there?"
    lines = [f"{q} pieces take {mul(q, b)} cm, and {sub(total, q * b)} cm are too short."]
    return question, lines, q


def rope_left(d: Draw) -> Problem:
    p = d.person()
    thing = d.pick(("rope", "ribbon", "cloth", "wire", "tape", "string"))
    n, a = d.number(2, 9), d.number(2, 20)
    total = n * a + d.integer(0, 80)
    question = d.pick(
        (
            f"From {total} m of {thing}, {p} cuts {n} pieces of {a} m. How many metres are left?",
            f"{p} has {total} m of {thing} and needs {n} pieces of {a} m each. "
            f"How many metres remain?",
        )
    )
    lines = [f"The pieces take {mul(n, a)} m.", f"{sub(total, n * a)} m are left."]
    return question, lines, total - n * a


def weights(d: Draw) -> Problem:
    p, (box, boxes) = d.person(), d.pick(words.CONTAINERS)
    n, a, b = d.number(2, 12), d.number(2, 20), d.number(2, 40)
    question = d.pick(
        (
            f"A cart weighs {b} kg. {p} loads {n} {boxes} of {a} kg each on it. "
            f"How many kg does the loaded cart weigh?",
            f"Each {box} weighs {a} kg. How many kg are {n} {boxes} on a cart of {b} kg, all "
            f"together?",
        )
    )
    lines = [f"The {boxes} weigh {mul(n, a)} kg.", f"With the cart that is {add(n * a, b)} kg."]
    return question, lines, n * a + b


def load_limit(d: Draw) -> Problem:
    thing = d.pick(("lift", "boat", "bridge", "cart", "van"))
    p, q, r = d.people(3)
    a, b, c = d.number(20, 99), d.number(20, 99), d.number(20, 99)
    total = a + b + c + d.integer(1, 99)
    question = d.pick(
        (
            f"A {thing} can bear {total} kg. {p} weighs {a} kg, {q} {b} kg and {r} {c} kg. "
            f"How many more kg can it bear with all three?",
            f"{p} of {a} kg, {q} of {b} kg and {r} of {c} kg use a {thing} for {total} kg. "
            f"How many kg are still free?",
        )
    )
    lines = [f"Together they weigh {add(a, b, c)} kg.", f"{sub(total, a + b + c)} kg are free."]
    return question, lines, total - a - b - c


def age_difference(d: Draw) -> Problem:
    p, q = d.people(2)
    a, b, n = d.number(5, 40), d.number(2, 20), d.number(2, 12)
    question = d.pick(
        (
            f"{p} is {a} years old and {q} is {b} years older. How old will {q} be in {n} years?",
            f"{q} is {b} years older than {p}, who is {a}. How old is {q} {n} years from now?",
        )
    )
    lines = [f"{q} is {add(a, b)} now.", f"In {n} years {q} will be {add(a + b, n)}."]
    return question, lines, a + b + n


def age_times(d: Draw) -> Problem:
    p, q = d.people(2)
    k, a = d.number(2, 5), d.number(4, 15)
    times = {2: "twice"}.get(k, f"{k} times")
    n = d.number(2, 12)
    question = d.pick(
        (
            f"{q} is {times} as old as {p}, who is {a}. How old will {q} be in {n} years?",
            f"{p} is {a}. {q} is {times} as old. What will {q}'s age be {n} years from now?",
        )
    )
    lines = [f"{q} is {mul(k, a)} now.", f"In {n} years {q} will be {add(k * a, n)}."]
    return question, lines, k * a + n


def ages_together(d: Draw) -> Problem:
    p, q, r = d.people(3)
    a, b, c = d.number(5, 30), d.number(2, 12), d.number(2, 12)
    c = min(c, a - 1)
    question = d.pick(
        (
            f"{p} is {a} years old. {q} is {b} years older than {p} and {r} is {c} years younger "
            f"than {p}. How old are the three together?",
            f"{q} is {b} years older and {r} {c} years younger than {p}. {p} is {a}. "
            f"What is the sum of their ages?",
        )
    )
    lines = [
        f"{q} is {add(a, b)}.",
        f"{r} is {sub(a, c)}.",
        f"Together they are {add(a, a + b, a - c)}.",
    ]
    return question, lines, 3 * a + b - c


def heights(d: Draw) -> Problem:
    p, q, r = d.people(3)
    a, b, c = d.number(100, 170), d.number(2, 20), d.number(2, 20)
    question = d.pick(
        (
            f"{p} is {a} cm tall. {q} is {b} cm taller than {p}, and {r} is {c} cm shorter than "
            f"{q}. "
            f"How many cm tall is {r}?",
            f"{r} is {c} cm shorter than {q}, who is {b} cm taller than {p}. {p} is {a} cm tall. "
            f"How tall is {r} in cm?",
        )
    )
    lines = [f"{q} is {add(a, b)} cm tall.", f"{r} is {sub(a + b, c)} cm tall."]
    return question, lines, a + b - c


def temperature(d: Draw) -> Problem:
    (x, y), place = d.sample(words.DAYS, 2), d.pick(words.PLACES)
    a, b = d.number(5, 30), d.number(2, 12)
    c = d.within(2, a + b)
    question = d.pick(
        (
            f"On {x} it is {a} degrees in the {place}. It gets {b} degrees warmer by noon and {c} "
            f"degrees colder by night. How many degrees is it at night?",
            f"In the {place} it was {a} degrees on {x}. By {y} it rose by {b} and then fell by {c} "
            f"degrees. How many degrees is it now?",
        )
    )
    lines = [f"First {add(a, b)} degrees.", f"Then {sub(a + b, c)} degrees."]
    return question, lines, a + b - c


def stairs(d: Draw) -> Problem:
    p = d.person()
    place = d.pick(("tower", "castle", "house", "lighthouse", "school"))
    n, a, b = d.number(2, 9), d.number(8, 20), d.number(2, 20)
    question = d.pick(
        (
            f"A {place} has {n} floors with {a} steps between one and the next, and {b} steps lead "
            f"up to its door. How many steps does {p} climb for {n} floors and the door?",
            f"{p} climbs {b} steps to the door of the {place} and then {n} flights of {a} steps. "
            f"How many steps is that?",
        )
    )
    lines = [f"The flights have {mul(n, a)} steps.", f"With the door {add(n * a, b)} steps."]
    return question, lines, n * a + b


def bottles(d: Draw) -> Problem:
    p = d.person()
    n, a, glass = d.number(2, 9), d.number(2, 6), d.number(2, 6)
    drink = d.pick(("juice", "milk", "water", "tea", "lemonade"))
    size = glass * a
    question = d.pick(
        (
            f"{p} fills glasses of {glass} dl from {n} bottles of {drink} with {size} dl each. "
            f"How many glasses can be filled?",
            f"There are {n} bottles with {size} dl of {drink} each. A glass takes {glass} dl. "
            f"How many glasses does that fill?",
        )
    )
    lines = [f"In all there are {mul(n, size)} dl.", f"They fill {div(n * size, glass)} glasses."]
    return question, lines, n * a


def fuel(d: Draw) -> Problem:
    p = d.person()
    a, n, c = d.number(4, 12), d.number(2, 9), d.number(2, 3)
    machine = d.pick(("car", "boat", "tractor", "van", "bus"))
    question = d.pick(
        (
            f"A {machine} uses {a} litres of fuel for 100 km. A litre costs ${c}. "
            f"How many dollars does the fuel for {n * 100} km cost?",
            f"{p}'s {machine} needs {a} litres per 100 km. What does the fuel for {n * 100} km "
            "cost "
            f"at ${c} a litre?",
        )
    )
    lines = [
        f"{n * 100} km are {n} times 100 km, so it takes {mul(n, a)} litres.",
        f"They cost {mul(c, n * a)} dollars.",
    ]
    return question, lines, c * n * a


def animals_food(d: Draw) -> Problem:
    p = d.person()
    animal = d.pick(("horses", "cows", "dogs", "goats", "pigs", "rabbits", "parrots", "cats"))
    n, a, days = d.number(2, 9), d.number(2, 9), d.number(2, 9)
    question = d.pick(
        (
            f"{p} keeps {n} {animal}. Each eats {a} kg a day. How many kg do they eat in {days} "
            "days?",
            f"Each of {n} {animal} gets {a} kg of food every day. How many kg does {p} need for "
            f"{days} days?",
        )
    )
    lines = [f"In a day they eat {mul(n, a)} kg.", f"In {days} days {mul(days, n * a)} kg."]
    return question, lines, n * a * days


def food_lasts(d: Draw) -> Problem:
    p = d.person()
    animal = d.pick(("horses", "cows", "dogs", "goats", "pigs", "rabbits", "parrots", "cats"))
    n, a, days = d.number(2, 6), d.number(2, 6), d.integer(2, 12)
    question = d.pick(
        (
            f"{p} has {n * a * days} kg of food for {n} {animal}. Each eats {a} kg a day. "
            f"For how many days is it enough?",
            f"{n} {animal} eat {a} kg each every day. How many days do {n * a * days} kg last?",
        )
    )
    lines = [f"In a day they eat {mul(n, a)} kg.", f"It lasts {div(n * a * days, n * a)} days."]
    return question, lines, days


def mean_of_three(d: Draw) -> Problem:
    p, (x, y, z) = d.person(), d.sample(words.DAYS, 3)
    mean = d.integer(5, 40)
    a, b = d.within(2, mean), d.within(mean, 2 * mean - 2)
    c = 3 * mean - a - b
    what = d.pick(("points", "fish", "visitors", "letters", "laps", "eggs"))
    question = d.pick(
        (
            f"{p} counts {a} {what} on {x}, {b} on {y} and {c} on {z}. "
            f"What is the average number of {what} a day?",
            f"The numbers of {what} on three days are {a}, {b} and {c}. What is their average?",
        )
    )
    lines = [f"Together {add(a, b, c)} {what}.", f"The average is {div(3 * mean, 3)}."]
    return question, lines, mean


def points(d: Draw) -> Problem:
    p, q = d.people(2)
    a, n, b, m = d.number(2, 9), d.number(2, 12), d.number(2, 9), d.number(1, 5)
    m_goals = "miss" if m == 1 else "misses"
    b = min(b, a * n // m)
    question = d.pick(
        (
            f"In a game each hit gives {a} points and each miss takes away {b}. {p} has {n} hits "
            "and "
            f"{m} {m_goals}. How many points is that?",
            f"{p} plays against {q}: {n} hits at {a} points each, and {m} {m_goals} that cost {b} "
            f"points each. How many points does {p} have?",
        )
    )
    lines = [
        f"The hits give {mul(n, a)} points.",
        f"The misses cost {mul(m, b)} points.",
        f"{sub(n * a, m * b)} points are left.",
    ]
    return question, lines, n * a - m * b


def score_needed(d: Draw) -> Problem:
    p = d.person()
    a, b, c = d.number(5, 60), d.number(5, 60), d.number(5, 60)
    goal = a + b + c + d.integer(1, 60)
    question = d.pick(
        (
            f"{p} wants {goal} points in four games and has {a}, {b} and {c} in the first three. "
            f"How many points does {p} need in the fourth?",
            f"After games with {a}, {b} and {c} points, how many more does {p} need for {goal}?",
        )
    )
    lines = [f"So far {add(a, b, c)} points.", f"{p} needs {sub(goal, a + b + c)} points more."]
    return question, lines, goal - a - b - c


def stacked(d: Draw) -> Problem:
    p, (_one, many) = d.person(), d.pick(words.GOODS)
    n, a, b = d.number(2, 12), d.number(2, 15), d.number(5, 80)
    question = d.pick(
        (
            f"{p} stacks {n} {many}, each {a} cm high, on a table of {b} cm. "
            f"How many cm above the floor is the top?",
            f"On a table {b} cm high stand {n} {many} on top of each other, {a} cm each. "
            f"How high does it reach in cm?",
        )
    )
    lines = [f"The {many} are {mul(n, a)} cm high.", f"With the table {add(n * a, b)} cm."]
    return question, lines, n * a + b


TRAINING = (
    rectangle_area, fence, fence_cost, area_cost, square_side, cut_rope, rope_left, weights,
    load_limit, age_difference, ages_together, heights, temperature, stairs, bottles, animals_food,
    food_lasts, mean_of_three, points, score_needed,
)  # fmt: skip
HELD_OUT = (age_times, fuel, stacked)
