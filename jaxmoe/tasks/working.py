"""Arithmetic written out in steps that a small model can take: every `=` holds.

Sums go from left to right; products and quotients of larger numbers are split into parts.
"""


def add(*terms: int) -> str:
    """ "12+7+5=19+5=24"."""
    text = "+".join(map(str, terms))
    while len(terms) > 1:
        terms = (terms[0] + terms[1], *terms[2:])
        text += "=" + "+".join(map(str, terms))
    return text


def sub(minuend: int, subtrahend: int) -> str:
    """ "31-12=19"."""
    return f"{minuend}-{subtrahend}={minuend - subtrahend}"


def mul(first: int, second: int) -> str:
    """ "3*12=36", "24*13=24*10+24*3=240+72=312"."""
    product = first * second
    small, large = sorted((first, second))
    if len(str(small).rstrip("0")) <= 1 and len(str(large).rstrip("0")) <= 2:
        return f"{first}*{second}={product}"
    if len(str(small).rstrip("0")) <= 1:
        split, other = large, small
    else:
        split, other = small, large
    parts = _parts(split)
    products = [other * part for part in parts]
    expanded = "+".join(f"{other}*{part}" for part in parts)
    return f"{first}*{second}={expanded}={add(*products)}"


def div(dividend: int, divisor: int) -> str:
    """An exact quotient: "96/4=24", "432/6=420/6+12/6=70+2=72"."""
    quotient, rest = divmod(dividend, divisor)
    assert rest == 0, (dividend, divisor)
    parts = _parts(quotient)
    if dividend < 100 or len(parts) <= 1:
        return f"{dividend}/{divisor}={quotient}"
    expanded = "+".join(f"{divisor * part}/{divisor}" for part in parts)
    return f"{dividend}/{divisor}={expanded}={add(*parts)}"


def _parts(number: int) -> list[int]:
    """312 is 300, 10 and 2."""
    digits = str(number)
    return [
        int(digit) * 10 ** (len(digits) - 1 - place)
        for place, digit in enumerate(digits)
        if digit != "0"
    ]
