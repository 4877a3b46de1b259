"""Word problems of one to five steps, from the templates in `jaxmoe.tasks.templates`."""

from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.templates import (
    Problem,
    counting,
    measures,
    sharing,
    shopping,
    time_and_work,
)


_THEMES = (counting, shopping, sharing, time_and_work, measures)
TRAINING = tuple(template for theme in _THEMES for template in theme.TRAINING)
HELD_OUT = tuple(template for theme in _THEMES for template in theme.HELD_OUT)


def make(draw: Draw, *, held_out: bool = False) -> Problem:
    """Question, lines of working, answer. `held_out` takes the templates training never uses."""
    return draw.pick(HELD_OUT if held_out else TRAINING)(draw)
