"""`jaxmoe serve` and `jaxmoe router` as processes beside a benchmark."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx


READY_SECONDS = 300.0
STOP_SECONDS = 30.0
ASK_SECONDS = 30.0


class Server:
    """The command with these arguments, which does not outlive the `with` block.

    What it prints goes to `log`; with `cores` it runs on these alone.
    """

    def __init__(
        self,
        *arguments: str,
        log: Path,
        cores: set[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.url = ""
        self.log = log
        with log.open("wb") as output, _on(cores):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "serving.cli", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )

    def is_ready(self) -> bool:
        """It takes requests, at `url` from now on. Raises RuntimeError if it has ended."""
        if found := re.search(r"^Ready: (\S+)$", self.log.read_text(errors="replace"), re.M):
            self.url = found[1]
        elif self.process.poll() is not None:
            raise RuntimeError(f"{self.process.args} ended: {self.last_lines()}")
        return bool(self.url)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.process.args} is not ready: {self.last_lines()}")
            time.sleep(0.1)

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])

    def metrics(self) -> dict[str, float]:
        """The values of `/metrics`, by names with labels as they are written there."""
        text = httpx.get(f"{self.url}/metrics", timeout=ASK_SECONDS, trust_env=False).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def _on(cores: set[int] | None) -> Iterator[None]:
    """What this thread starts meanwhile runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def wait_until_healthy(url: str) -> None:
    """Until the router there has a worker of each role."""
    deadline = time.monotonic() + READY_SECONDS
    while not httpx.get(f"{url}/health", timeout=ASK_SECONDS, trust_env=False).is_success:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the router at {url} has no worker of each role")
        time.sleep(0.1)
