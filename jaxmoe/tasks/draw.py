"""Random choices for the generators: the same on every Python version, told apart by use.

Only `random.Random.random` is used, the one method whose sequence Python promises to keep. Numbers
that `is_held_out` marks never stand in a training question; the generators need not care.
"""

import random
import re
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

from jaxmoe.tasks import words


T = TypeVar("T")

_NUMBER = re.compile(r"\d+")


def is_held_out(number: int) -> bool:
    """Whether training questions avoid this number. Round and everyday numbers are not held out."""
    return number >= 10 and number % 13 in (3, 6)


def has_held_out_number(text: str) -> bool:
    return any(is_held_out(int(number)) for number in _NUMBER.findall(text))


class Person(str):
    """A name that knows its pronouns."""

    he: str
    his: str
    him: str

    def __new__(cls, name: str, he: str, his: str, him: str) -> "Person":
        self = super().__new__(cls, name)
        self.he, self.his, self.him = he, his, him
        return self


_PEOPLE = tuple(
    [Person(name, "she", "her", "her") for name in words.WOMEN]
    + [Person(name, "he", "his", "him") for name in words.MEN]
)


class Draw:
    """One item's random choices.

    Attributes:
      prefers_held_out: whether `number` looks for held-out numbers, also above the range.
    """

    __slots__ = ("_random", "prefers_held_out")

    def __init__(self, seed: str, *, prefers_held_out: bool = False):
        self._random = random.Random(seed).random
        self.prefers_held_out = prefers_held_out

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def integer(self, low: int, high: int) -> int:
        """Any integer from low to high, both included."""
        return low + int(self._random() * (high - low + 1))

    def number(self, low: int, high: int) -> int:
        """A number for a question, both ends included; a held-out one is from a range three times
        as wide, if it is not one of small numbers."""
        if self.prefers_held_out and high >= 12:
            high += 2 * (high - low)
        return self.within(low, high)

    def within(self, low: int, high: int) -> int:
        """A number for a question whose bounds must be kept."""
        wanted = self.prefers_held_out and high >= 12 and self._random() < 0.8
        number = low
        for _ in range(20):
            number = low + int(self._random() * (high - low + 1))
            if is_held_out(number) == wanted:
                break
        return number

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Different ones, in random order."""
        left = list(options)
        return [left.pop(int(self._random() * len(left))) for _ in range(count)]

    def shuffle(self, values: MutableSequence) -> None:
        for last in range(len(values) - 1, 0, -1):
            other = int(self._random() * (last + 1))
            values[last], values[other] = values[other], values[last]

    def person(self) -> Person:
        return self.pick(_PEOPLE)

    def people(self, count: int) -> list[Person]:
        return self.sample(_PEOPLE, count)
