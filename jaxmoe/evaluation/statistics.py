"""The two statistics an accuracy is judged by: its interval, and a paired test of two of them."""

import dataclasses
import math
from collections.abc import Sequence


Z_95 = 1.959963984540054
"""The standard normal distribution's 0.975 quantile."""


def wilson_interval(num_correct: int, num_items: int, *, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) when there are no items."""
    if not 0 <= num_correct <= num_items:
        raise ValueError(f"num_correct must be in [0, {num_items}], got {num_correct}")
    if num_items == 0:
        return 0.0, 1.0
    share, spread = num_correct / num_items, z * z / num_items
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt((share * (1 - share) + spread / 4) / num_items)
    # Where all are wrong or all right, rounding must not take the end away from 0 or 1.
    low = 0.0 if num_correct == 0 else centre - half
    high = 1.0 if num_correct == num_items else centre + half
    return low, high


@dataclasses.dataclass(frozen=True)
class McNemar:
    """McNemar's exact two-sided test of the same items answered twice.

    Attributes:
      b: items that only the first time were right.
      c: items that only the second time were right.
      p_value: how likely a split of b + c at least this uneven is if either way is as likely.
    """

    b: int
    c: int

    @property
    def p_value(self) -> float:
        num_discordant = self.b + self.c
        tail = sum(math.comb(num_discordant, k) for k in range(min(self.b, self.c) + 1))
        # Integers to the end: their quotient is exact where the powers would overflow.
        return min(1.0, 2 * tail / 2**num_discordant)


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Of two runs' outcomes, item by item."""
    pairs = list(zip(first, second, strict=True))
    return McNemar(
        b=sum(was and not now for was, now in pairs),
        c=sum(now and not was for was, now in pairs),
    )
