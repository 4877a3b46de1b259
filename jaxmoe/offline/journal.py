"""Results on disk: a journal that survives being killed, then the output file in input order.

`OUTPUT.partial` starts with a line that says what the run is made from. The others are results in
the order they were finished, on disk when `append` returns. A run that finds the journal of the
same inputs and options continues it; of others, it refuses.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO


JOURNAL_SUFFIX = ".partial"


class JournalError(ValueError):
    """The output or the journal is not one that this run may write to."""


class Journal:
    """Open with `open_journal`.

    Attributes:
      done: numbers of the inputs whose results are on disk.
    """

    def __init__(self, file: BinaryIO, path: Path, output: Path, offsets: dict[int, int]):
        self._file, self._path, self._output, self._offsets = file, path, output, offsets

    @property
    def done(self) -> frozenset[int]:
        return frozenset(self._offsets)

    def append(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Write results, each with its "index", and wait until they are on disk."""
        offset = self._file.seek(0, os.SEEK_END)
        for result in results:
            line = _encode(result)
            self._file.write(line)
            self._offsets[result["index"]] = offset
            offset += len(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, others: Iterable[Mapping[str, Any]]) -> None:
        """Put the results and `others` into the output file by index, and remove the journal."""
        lines: dict[int, int | bytes] = {**self._offsets}
        lines.update((other["index"], _encode(other)) for other in others)
        temporary = self._output.with_name(self._output.name + ".tmp")
        with temporary.open("wb") as output:
            for _, where in sorted(lines.items()):
                if isinstance(where, int):
                    self._file.seek(where)
                    where = self._file.readline()
                output.write(where)
            output.flush()
            os.fsync(output.fileno())
        temporary.replace(self._output)
        self._path.unlink()


@contextlib.contextmanager
def open_journal(
    output: Path, made_from: Mapping[str, Any], *, overwrite: bool = False
) -> Iterator[Journal]:
    """The journal of `output`, continued if there is one and locked until the context ends.

    Raises JournalError if the output exists, or the journal is of another run or in use; with
    `overwrite` only if it is in use.
    """
    path = output.with_name(output.name + JOURNAL_SUFFIX)
    if not output.parent.is_dir():
        raise JournalError(f"the output's directory {output.parent} does not exist")
    if output.is_dir():
        raise JournalError(f"the output {output} is a directory")
    if output.exists() and not path.exists() and not overwrite:
        raise JournalError(f"{output} exists: choose another output or pass --overwrite")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{path} is being written by another run") from None
        offsets = {} if overwrite else _read(file, path, made_from)
        if not offsets:
            file.seek(0)
            file.truncate()
            file.write(_encode(made_from))
            file.flush()
            os.fsync(file.fileno())
        journal = Journal(file, path, output, offsets)
        try:
            yield journal
        finally:
            if not journal.done:
                path.unlink(missing_ok=True)


def _read(file: BinaryIO, path: Path, made_from: Mapping[str, Any]) -> dict[int, int]:
    """Where each result is. Cuts off a last line that was not written whole."""
    header = file.readline()
    if not header.endswith(b"\n"):
        return {}
    if (was := _decode(header)) is None:
        raise JournalError(f"{path} is not a journal of `jaxmoe generate`: pass --overwrite")
    offsets: dict[int, int] = {}
    end = file.tell()
    for line in file:
        result = _decode(line) if line.endswith(b"\n") else None
        if result is None or not isinstance(result.get("index"), int):
            break
        offsets[result["index"]] = end
        end += len(line)
    now = json.loads(_encode(made_from))
    differing = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
    if offsets and differing:
        raise JournalError(
            f"{path} was begun with other inputs or options ({', '.join(differing)}): pass "
            "--overwrite to start again, or the same ones to continue"
        )
    file.truncate(end)
    return offsets


def _encode(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n"


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
