"""Programs that tests run beside themselves, alone or as the members of a group."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent


class Process:
    """A module run as a program. It does not outlive the `with` block."""

    def __init__(self, module: str, *arguments: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        )  # fmt: skip
        self.lines: list[str] = []
        """What it has printed, its errors too."""
        self._num_read = 0
        self._has_ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify()
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def read_until(self, pattern: str, timeout: float = 240) -> re.Match[str]:
        """Of the first line from here on that begins so."""
        found = None
        with self._changed:
            while found is None:
                has_more = self._changed.wait_for(
                    lambda: self._num_read < len(self.lines) or self._has_ended, timeout
                )
                assert has_more and self._num_read < len(self.lines), (
                    f"no {pattern!r} in {self.lines}"
                )
                found = re.match(pattern, self.lines[self._num_read])
                self._num_read += 1
        return found

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def group_name() -> str:
    return f"test-{os.getpid()}-{random.randrange(2**30)}"


@contextlib.contextmanager
def members(
    module: str,
    arguments_of: Callable[[int], dict[str, Any]],
    which: range,
    *,
    name: str,
    tidies_up: bool = True,
) -> Iterator[list[Process]]:
    """Some of the members of the EP group `name`, each told its arguments in JSON.

    A program's last line is "done" or "error: ...". When all have ended, the group's memory must be
    gone, if somebody `tidies_up`.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(Process(module, json.dumps(arguments_of(member))))
            for member in which
        ]
        yield processes
        for process in processes:
            if re.match("done|error", (process.lines or [""])[-1]):
                process.process.wait(20)  # it leaves the group
    assert not tidies_up or not Path(f"/dev/shm/jaxmoe-{name}").exists()
