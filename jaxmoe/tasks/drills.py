"""Arithmetic drills: short questions without a story."""

from jaxmoe.tasks import words
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.working import add, div, mul, sub


Task = tuple[str, list[str], str]


def make(draw: Draw) -> Task:
    """Question, lines of working, answer."""
    return draw.pick(_DRILLS)(draw)


def _ask(draw: Draw, expression: str) -> str:
    if draw.chance(0.2):
        expression = expression.replace(" ", "")
    return draw.pick(
        (
            f"What is {expression}?",
            f"Calculate {expression}.",
            f"Work out {expression}.",
            f"{expression} = ?",
            f"{expression}",
            f"How much is {expression}?",
            f"Please compute {expression}.",
        )
    )


def _size(draw: Draw) -> int:
    """Ends of the ranges: one, two or three digits."""
    return draw.pick((9, 30, 99, 99, 300, 999))


def _add(draw: Draw) -> Task:
    a, b = draw.number(0, _size(draw)), draw.number(0, _size(draw))
    if draw.chance(0.2):
        question = draw.pick(
            (f"What is {a} plus {b}?", f"What is the sum of {a} and {b}?", f"Add {a} and {b}.")
        )
    else:
        question = _ask(draw, f"{a} + {b}")
    return question, [f"{add(a, b)}"], str(a + b)


def _subtract(draw: Draw) -> Task:
    a, b = draw.number(0, _size(draw)), draw.number(0, _size(draw))
    a, b = max(a, b), min(a, b)
    if draw.chance(0.2):
        question = draw.pick(
            (
                f"What is {a} minus {b}?",
                f"Subtract {b} from {a}.",
                f"What is the difference between {a} and {b}?",
            )
        )
    else:
        question = _ask(draw, f"{a} - {b}")
    return question, [f"{sub(a, b)}"], str(a - b)


def _multiply(draw: Draw) -> Task:
    a, b = draw.pick(
        (
            (draw.number(0, 12), draw.number(0, 12)),
            (draw.number(2, 9), draw.number(10, 99)),
            (draw.number(10, 99), draw.number(2, 9)),
            (draw.number(11, 40), draw.number(11, 30)),
            (draw.number(2, 9), draw.number(100, 300)),
        )
    )
    if draw.chance(0.2):
        question = draw.pick(
            (
                f"What is {a} times {b}?",
                f"Multiply {a} by {b}.",
                f"What is the product of {a} and {b}?",
            )
        )
    else:
        question = _ask(draw, f"{a} * {b}")
    return question, [f"{mul(a, b)}"], str(a * b)


def _divide(draw: Draw) -> Task:
    b = draw.number(2, 12)
    quotient = draw.integer(1, draw.pick((10, 12, 30, 99)))
    a = b * quotient
    if draw.chance(0.2):
        question = draw.pick(
            (
                f"What is {a} divided by {b}?",
                f"Divide {a} by {b}.",
                f"How many times does {b} go into {a}?",
            )
        )
    else:
        question = _ask(draw, f"{a} / {b}")
    return question, [f"{div(a, b)}"], str(quotient)


def _remainder(draw: Draw) -> Task:
    b = draw.number(2, 9)
    a = draw.within(b, 12 * b - 1)
    quotient, rest = divmod(a, b)
    question = draw.pick(
        (
            f"What is the remainder when {a} is divided by {b}?",
            f"{a} is divided by {b}. What is left over?",
            f"What is {a} modulo {b}?",
        )
    )
    lines = [f"The largest multiple of {b} up to {a} is {mul(quotient, b)}.", f"{sub(a, a - rest)}"]
    return question, lines, str(rest)


def _sum_of_list(draw: Draw) -> Task:
    numbers = [draw.number(1, draw.pick((20, 99))) for _ in range(draw.integer(3, 5))]
    listed = ", ".join(map(str, numbers))
    if draw.chance(0.4):
        question = _ask(draw, " + ".join(map(str, numbers)))
    else:
        question = draw.pick((f"Add up these numbers: {listed}.", f"What is the sum of {listed}?"))
    return question, [add(*numbers)], str(sum(numbers))


def _mixed(draw: Draw) -> Task:
    a, b, c = draw.number(2, 9), draw.number(2, 12), draw.number(1, 50)
    product = a * b
    if draw.chance(0.4):
        expression, line, result = f"{a} * {b} + {c}", add(product, c), product + c
    elif draw.chance(0.4):
        expression, line, result = f"{c} + {a} * {b}", add(c, product), product + c
    else:
        c = draw.within(0, product)
        expression, line, result = f"{a} * {b} - {c}", sub(product, c), product - c
    return _ask(draw, expression), [f"First {mul(a, b)}.", f"Then {line}."], str(result)


def _brackets(draw: Draw) -> Task:
    a, b, c = draw.number(1, 20), draw.number(1, 20), draw.number(2, 9)
    if draw.chance(0.5):
        inner, expression = add(a, b), f"({a} + {b}) * {c}"
        value = a + b
    else:
        a, b = max(a, b), min(a, b)
        inner, expression = sub(a, b), f"({a} - {b}) * {c}"
        value = a - b
    lines = [f"First {inner}.", f"Then {mul(value, c)}."]
    return _ask(draw, expression), lines, str(value * c)


def _compare(draw: Draw) -> Task:
    size = draw.pick((99, 999))
    a = draw.number(1, size)
    b = draw.number(1, size)
    if draw.chance(0.3):  # the same first digit, so that the others decide
        b = max(1, min(size, a + draw.integer(-9, 9)))
    if a == b:
        b += 1
    larger = draw.chance(0.5)
    word = draw.pick(("larger", "greater", "bigger") if larger else ("smaller", "less"))
    question = draw.pick((f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"))
    high, low = max(a, b), min(a, b)
    lines = [f"The difference is {sub(high, low)}, so {high} is larger and {low} is smaller."]
    return question, lines, str(high if larger else low)


def _extreme(draw: Draw) -> Task:
    numbers = []
    count = draw.integer(3, 5)
    while len(numbers) < count:
        number = draw.number(1, draw.pick((99, 300)))
        if number not in numbers:
            numbers.append(number)
    if draw.chance(0.5):
        word, ordered = draw.pick(("largest", "greatest")), sorted(numbers, reverse=True)
    else:
        word, ordered = draw.pick(("smallest", "lowest")), sorted(numbers)
    listed = ", ".join(map(str, numbers))
    question = draw.pick(
        (f"Which of these numbers is the {word}: {listed}?", f"Find the {word} number: {listed}.")
    )
    return question, ["In order: " + ", ".join(map(str, ordered)) + "."], str(ordered[0])


def _sequence(draw: Draw) -> Task:
    step = draw.number(2, 12)
    start, length = draw.number(1, 40), draw.integer(4, 5)
    rising = draw.chance(0.6)
    if rising:
        terms = [start + step * place for place in range(length + 1)]
    else:
        terms = [start + step * (length - place) for place in range(length + 1)]
    shown = ", ".join(map(str, terms[:-1]))
    question = draw.pick(
        (
            f"What comes next: {shown}?",
            f"Which number continues the sequence {shown}?",
            f"Find the next number: {shown}, ...",
        )
    )
    if rising:
        rule = f"{sub(terms[1], terms[0])}, so each number is {step} more than the one before."
        last = add(terms[-2], step)
    else:
        rule = f"{sub(terms[0], terms[1])}, so each number is {step} less than the one before."
        last = sub(terms[-2], step)
    return question, [rule, f"The next one is {last}."], str(terms[-1])


def _doubling(draw: Draw) -> Task:
    start, factor = draw.number(1, 6), draw.pick((2, 2, 3))
    terms = [start * factor**place for place in range(5)]
    shown = ", ".join(map(str, terms[:-1]))
    question = draw.pick(
        (f"What comes next: {shown}?", f"Which number continues the sequence {shown}?")
    )
    lines = [
        f"{div(terms[1], terms[0])}, so each number is {factor} times the one before.",
        f"The next one is {mul(terms[-2], factor)}.",
    ]
    return question, lines, str(terms[-1])


def _missing(draw: Draw) -> Task:
    a, b = draw.number(1, 60), draw.number(1, 60)
    blank = draw.pick(("?", "x", "___"))
    kind = draw.integer(0, 3)
    if kind == 0:
        equation, line, result = f"{a} + {blank} = {a + b}", sub(a + b, a), b
    elif kind == 1:
        equation, line, result = f"{blank} + {b} = {a + b}", sub(a + b, b), a
    elif kind == 2:
        equation, line, result = f"{blank} - {b} = {a}", add(a, b), a + b
    else:
        a, b = draw.number(2, 9), draw.number(2, 12)
        equation, line, result = f"{a} * {blank} = {a * b}", div(a * b, a), b
    question = draw.pick(
        (
            f"Find the missing number: {equation}.",
            f"Which number must stand for {blank} in {equation}?",
            f"Solve {equation}.",
        )
    )
    return question, [f"The missing number is {line}."], str(result)


def _times(draw: Draw) -> Task:
    word, factor = draw.pick((("Double", 2), ("Triple", 3)))
    a = draw.number(2, 80)
    question = draw.pick((f"{word} {a}.", f"What is {word.lower()} {a}?"))
    return question, [f"{word} {a} is {mul(factor, a)}."], str(factor * a)


def _part(draw: Draw) -> Task:
    word, divisor = draw.pick((("Half", 2), ("A third", 3), ("A quarter", 4), ("A fifth", 5)))
    whole = divisor * draw.integer(2, 40)
    asked = f"{word.lower()} of {whole}"
    question = draw.pick((f"What is {asked}?", f"How much is {asked}?", f"Work out {asked}."))
    return question, [f"{word} of {whole} is {div(whole, divisor)}."], str(whole // divisor)


def _percent(draw: Draw) -> Task:
    percent, divisor = draw.pick(((50, 2), (25, 4), (10, 10), (20, 5)))
    whole = divisor * draw.integer(2, 30)
    question = draw.pick(
        (f"What is {percent}% of {whole}?", f"Work out {percent} percent of {whole}.")
    )
    line = f"{percent}% is one part in {divisor}: {div(whole, divisor)}."
    return question, [line], str(whole // divisor)


def _parity(draw: Draw) -> Task:
    number = draw.number(1, 999)
    word = "even" if number % 2 == 0 else "odd"
    question = draw.pick((f"Is {number} even or odd?", f"Is the number {number} odd or even?"))
    return question, [f"The last digit of {number} is {number % 10}, which is {word}."], word


def _word_sum(draw: Draw) -> Task:
    """Numbers with a thing behind them."""
    a, b, thing = draw.number(2, 99), draw.number(2, 99), draw.pick(words.THINGS)
    if draw.chance(0.5):
        return f"What is {a} {thing} plus {b} {thing}?", [f"{add(a, b)} {thing}."], str(a + b)
    a, b = max(a, b), min(a, b)
    return f"What is {a} {thing} minus {b} {thing}?", [f"{sub(a, b)} {thing}."], str(a - b)


_DRILLS = (
    _add, _add, _add, _subtract, _subtract, _subtract, _multiply, _multiply, _multiply, _divide,
    _divide, _remainder, _sum_of_list, _mixed, _brackets, _compare, _extreme, _sequence, _doubling,
    _missing, _times, _part, _percent, _parity, _word_sum,
)  # fmt: skip
