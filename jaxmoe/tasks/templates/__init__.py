"""The word problems' templates, by theme.

A template is a function of a Draw that gives a question, lines of working and the exact answer, a
nonnegative integer it has computed. Each module lists its own in TRAINING and HELD_OUT.
"""

from collections.abc import Callable

from jaxmoe.tasks.draw import Draw


Problem = tuple[str, list[str], int]
Template = Callable[[Draw], Problem]
