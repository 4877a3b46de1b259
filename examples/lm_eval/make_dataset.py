"""The evaluation sets as JSONL files that lm-eval reads.

One file for each set with a question and its answer a line, and `choices.jsonl`, whose lines offer
four worked solutions that differ in the result. The task files beside this module name the fields.

    python -m examples.lm_eval.make_dataset [--output DIR]
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxmoe.tasks import EVALUATION_SETS, Item, evaluation_set
from jaxmoe.tasks.draw import Draw
from jaxmoe.tasks.sets import ANSWER_MARK


DATA_DIR = Path(__file__).parent / "data"
CHOICES_SET = "heldout_numbers"
NUM_CHOICES = 4

_DISTANCES = (1, 2, 9, 10, 11, 20, 100)


def questions(name: str) -> Iterator[dict[str, Any]]:
    """The items of a set, in its order, so that `--limit N` takes what `jaxmoe eval` takes."""
    for index, item in enumerate(evaluation_set(name)):
        yield {
            "id": f"{name}/{index}",
            "question": item.question,
            "answer": item.answer,
            "domain": item.domain,
        }


def choices(name: str = CHOICES_SET) -> Iterator[dict[str, Any]]:
    """The items of a set whose answer is a number: the right solution (at `label`) and wrong ones.

    A wrong one has another number in the last two places of the answer, the end of the working and
    after the mark. What stands before is equal, so only the result decides.
    """
    for index, item in enumerate(evaluation_set(name)):
        if not item.answer.isdecimal():
            continue
        draw = Draw(f"choices/{name}/{index}")
        numbers = [int(item.answer), *_wrong_numbers(draw, int(item.answer))]
        draw.shuffle(numbers)
        yield {
            "id": f"{name}/{index}",
            "question": item.question,
            "choices": [_with_result(item, number) for number in numbers],
            "label": numbers.index(int(item.answer)),
        }


def _wrong_numbers(draw: Draw, right: int) -> list[int]:
    near = [right + distance for distance in _DISTANCES]
    near += [right - distance for distance in _DISTANCES if distance <= right]
    return draw.sample(near, NUM_CHOICES - 1)


def _with_result(item: Item, number: int) -> str:
    working = item.solution.rpartition(ANSWER_MARK)[0]
    places = list(re.finditer(rf"(?<!\d){item.answer}(?!\d)", working))
    if places:
        working = f"{working[: places[-1].start()]}{number}{working[places[-1].end() :]}"
    return f"{working}{ANSWER_MARK} {number}"


def write(folder: Path) -> list[Path]:
    """Write all files into a folder, made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(name, questions(name)) for name in EVALUATION_SETS] + [("choices", choices())]
    return [_write_lines(folder / f"{name}.jsonl", lines) for name, lines in files]


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the evaluation sets as JSONL files.")
    parser.add_argument(
        "--output", type=Path, default=DATA_DIR, metavar="DIR", help="(%(default)s)"
    )
    for path in write(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
