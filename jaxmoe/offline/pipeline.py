"""From a file of prompts to batches, with Grain: read, parse, tokenise, sort into batches.

Lines are JSON objects with one of "prompt", "prompt_ids" and "messages" (a conversation for the
chat template), and optionally "max_new_tokens", "temperature", "seed" and "id". Empty lines count
and are skipped. Reading and tokenising run ahead of the consumer on threads.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain

from jaxmoe.offline.engine import BatchShape, shape_of
from jaxmoe.offline.options import GenerationOptions, PromptRequest, make_request
from jaxmoe.tokenizer import Tokenizer


READ_THREADS = 2
READ_AHEAD = 256

_PROMPTS = ("prompt", "prompt_ids", "messages")
_OVERRIDES = ("max_new_tokens", "temperature", "seed")
_FIELDS = (*_PROMPTS, *_OVERRIDES, "id")


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A line that cannot be run, and the rule it breaks."""

    index: int
    error: str

    @property
    def line_number(self) -> int:
        return self.index + 1


class PromptFile:
    """A Grain source: the lines of a file, each with its number. Only offsets are in memory."""

    def __init__(self, path: Path, *, skip: Collection[int] = ()):
        """Lines in `skip` are left out."""
        self._path = path
        self._lines: list[tuple[int, int]] = []  # number, offset
        self.num_prompts = 0
        offset = 0
        with path.open("rb") as file:
            for index, line in enumerate(file):
                if line.strip():
                    self.num_prompts += 1
                    if index not in skip:
                        self._lines.append((index, offset))
                offset += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> tuple[int, bytes]:
        number, offset = self._lines[index]
        with self._path.open("rb") as file:
            file.seek(offset)
            return number, file.readline()


@dataclasses.dataclass(frozen=True)
class LineParser:
    """A line to a request, or to the rule it breaks."""

    options: GenerationOptions
    tokenizer: Tokenizer | None
    vocab_size: int
    max_tokens: int

    def __call__(self, line: tuple[int, bytes]) -> PromptRequest | Rejected:
        index, raw = line
        try:
            return self._parse(index, raw)
        except ValueError as error:
            return Rejected(index, str(error))

    def _parse(self, index: int, raw: bytes) -> PromptRequest:
        try:
            fields = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"the line must be UTF-8 text: {error}") from error
        except (ValueError, RecursionError) as error:  # ValueError: an integer of too many digits
            raise ValueError(f"the line must be a JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"the line must be a JSON object, got {type(fields).__name__}")
        if unknown := sorted(set(fields) - set(_FIELDS)):
            raise ValueError(f"unknown fields {unknown}; a line may have {list(_FIELDS)}")
        if b"\\u" in raw:
            # A lone surrogate is valid JSON, but no tokenizer and no file takes it.
            json.dumps(fields, ensure_ascii=False).encode("utf-8")
        given = [name for name in _PROMPTS if name in fields]
        if len(given) != 1:
            raise ValueError(f"the line must have exactly one of {list(_PROMPTS)}, got {given}")
        id = fields.get("id")
        if not (id is None or isinstance(id, str) or type(id) is int):
            raise ValueError(f"id must be a string or an integer, got {id!r}")
        return make_request(
            index,
            self._prompt_ids(given[0], fields[given[0]]),
            self.options,
            vocab_size=self.vocab_size,
            max_tokens=self.max_tokens,
            id=id,
            **{name: fields[name] for name in _OVERRIDES if fields.get(name) is not None},
        )

    def _prompt_ids(self, name: str, value: Any) -> Sequence[int]:
        if name == "prompt_ids":
            if not isinstance(value, list):
                raise ValueError(f"prompt_ids must be a list of integers, got {value!r:.80}")
            return value
        if self.tokenizer is None:
            raise ValueError(f"the model has no tokenizer, so {name} must be prompt_ids")
        if name == "prompt":
            if not isinstance(value, str):
                raise ValueError(f"prompt must be a string, got {value!r:.80}")
            return self.tokenizer.encode(value)
        if not (
            isinstance(value, list)
            and value
            and all(isinstance(message, dict) and "role" in message for message in value)
        ):
            raise ValueError(
                f"messages must be a list of objects with a role and content, got {value!r:.80}"
            )
        return self.tokenizer.apply_chat_template(value)


def batches(
    source: PromptFile, parse: LineParser, batch_size: int
) -> Iterator[list[PromptRequest] | Rejected]:
    """Batches of requests of one shape, and rejected lines as they are met.

    What is left over at the end is put together across shapes, the largest first: fuller batches
    are worth more than tight ones. Only the last one is short.
    """
    by_shape: dict[BatchShape, list[PromptRequest]] = defaultdict(list)
    dataset = (
        grain.MapDataset.source(source)
        .map(parse)
        .to_iter_dataset(
            grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_AHEAD)
        )
    )
    for item in dataset:
        if isinstance(item, Rejected):
            yield item
            continue
        waiting = by_shape[shape_of(item)]
        waiting.append(item)
        if len(waiting) == batch_size:
            yield by_shape.pop(shape_of(item))
    rest = [request for waiting in by_shape.values() for request in waiting]
    rest.sort(key=lambda request: (-request.max_new_tokens, -len(request.prompt_ids)))
    for start in range(0, len(rest), batch_size):
        yield rest[start : start + batch_size]
