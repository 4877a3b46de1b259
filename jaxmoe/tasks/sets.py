"""Items for training and the three evaluation sets, which no training question is in.

- `new_seeds`: what training is made of, with new draws. A question whose CRC-32 is divisible by
  32 is kept out of training and may stand here.
- `heldout_numbers`: training templates with numbers that stand in no training question, up to
  three times as large as a slot's training range allows.
- `heldout_templates`: templates that training never uses, with training numbers.
"""

import dataclasses
import functools
import zlib
from typing import Literal, get_args

from jaxmoe.tasks import drills, problems, stories
from jaxmoe.tasks.draw import Draw, has_held_out_number


Domain = Literal["problems", "stories", "drills"]
DOMAINS: tuple[Domain, ...] = get_args(Domain)
EVALUATION_SETS = ("new_seeds", "heldout_numbers", "heldout_templates")
NUM_EVALUATION_ITEMS = 1319  # as many as GSM8K's test set
ANSWER_MARK = "####"

_KEPT_OUT = 32
_MIX = ("problems",) * 3 + ("stories", "drills")


@dataclasses.dataclass(frozen=True)
class Item:
    """A question and its exact answer.

    Attributes:
      solution: lines of working, then `#### answer`.
    """

    question: str
    answer: str
    solution: str
    domain: Domain


def train_item(seed: int, index: int) -> Item:
    """The item at this place of the endless training stream."""
    draw = Draw(f"train/{seed}/{index}")
    domain = draw.pick(_MIX)
    while True:
        item = _make(draw, domain)
        if not has_held_out_number(item.question) and not _is_kept_out(item.question):
            return item


@functools.cache
def evaluation_set(name: str) -> tuple[Item, ...]:
    """A fixed set of 1319 items without repetitions."""
    if name not in EVALUATION_SETS:
        raise ValueError(f"evaluation set {name!r} is not one of {', '.join(EVALUATION_SETS)}")
    items: dict[str, Item] = {}
    draw = Draw(f"evaluation/{name}", prefers_held_out=name == "heldout_numbers")
    while len(items) < NUM_EVALUATION_ITEMS:
        item = _evaluation_item(draw, name)
        if item is not None:
            items.setdefault(item.question, item)
    return tuple(items.values())


def _evaluation_item(draw: Draw, name: str) -> Item | None:
    """One draw; None if it is not for this set."""
    if name == "new_seeds":
        item = _make(draw, draw.pick(_MIX))
        is_wanted = _is_kept_out(item.question) and not has_held_out_number(item.question)
    elif name == "heldout_numbers":
        item = _make(draw, draw.pick(("problems", "problems", "problems", "drills")))
        is_wanted = has_held_out_number(item.question)
    else:
        domain = draw.pick(("problems", "problems", "stories"))
        item = _make(draw, domain, held_out_templates=True)
        is_wanted = not has_held_out_number(item.question)
    return item if is_wanted else None


def extract_answer(text: str) -> str | None:
    """What stands after the last `####`, to the end of that line; None without one."""
    before, mark, after = text.rpartition(ANSWER_MARK)
    del before
    lines = after.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def is_correct(item: Item, text: str) -> bool:
    """Whether the text's answer is the item's, whatever its case, units sign or full stop."""
    answer = extract_answer(text)
    return answer is not None and _normal(answer) == _normal(item.answer)


def _normal(answer: str) -> str:
    return answer.strip().lower().rstrip(".").lstrip("$").replace(",", "").strip()


def _is_kept_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % _KEPT_OUT == 0


def _make(draw: Draw, domain: Domain, *, held_out_templates: bool = False) -> Item:
    if domain == "problems":
        question, lines, number = problems.make(draw, held_out=held_out_templates)
        answer = str(number)
    elif domain == "stories":
        question, lines, answer = stories.make(draw, held_out=held_out_templates)
    else:
        question, lines, answer = drills.make(draw)
    solution = "\n".join([*lines, f"{ANSWER_MARK} {answer}"])
    return Item(question=question, answer=str(answer), solution=solution, domain=domain)
