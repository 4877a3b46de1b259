"""Which of several workers gets a request.

A policy sees snapshots of the workers of one role, in any order and never none, and the start of
the prompt. Each role has a policy object of its own, used on one thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from serving.router.pool import Snapshot


BLOCK_BYTES = 256  # about what a page of 64 tokens takes as text
MAX_PROMPT_BYTES = 256 * BLOCK_BYTES  # of a prompt, that are looked at
MAX_BLOCKS = 1 << 16  # kept: some 10 MB
MIN_MATCHED_SHARE = 0.5
# A worker that has a prompt's start is left alone when it has this many times the requests of the
# one with the least to do, and so many more.
MAX_LOAD_RATIO = 1.5
MAX_EXTRA_REQUESTS = 8


@runtime_checkable
class Policy(Protocol):
    def choose(self, workers: Sequence[Snapshot], prompt: bytes) -> Snapshot: ...

    def forget(self) -> None:
        """The workers' caches are empty."""
        ...


class RoundRobin:
    """Each in turn, by URL; who comes and goes does not change the order of the others."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, workers: Sequence[Snapshot], prompt: bytes) -> Snapshot:
        chosen = min(workers, key=lambda worker: (worker.url <= self._last, worker.url))
        self._last = chosen.url
        return chosen

    def forget(self) -> None:
        pass


class LeastLoad:
    """One with the least to do, in turn when there are several."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def choose(self, workers: Sequence[Snapshot], prompt: bytes) -> Snapshot:
        least = min(worker.load for worker in workers)
        return self._turns.choose([worker for worker in workers if worker.load == least], prompt)

    def forget(self) -> None:
        pass


class CacheAware:
    """The worker that last got the longest start of this prompt, and so has it in its cache.

    The one with the least to do, if that start is a small share of the prompt or the worker has
    far more to do. A start is known by the hash of its last block and all before it; the table of
    these is bounded, and those not met for the longest time go first.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self._max_blocks = max_blocks
        self._least_load = LeastLoad()
        self._url_of: OrderedDict[int, str] = OrderedDict()

    def choose(self, workers: Sequence[Snapshot], prompt: bytes) -> Snapshot:
        starts = _hashes_of_starts(prompt)
        chosen = self._matched(workers, starts)
        least = self._least_load.choose(workers, prompt)
        if chosen is None or _is_overloaded(chosen, least):
            chosen = least
        # The longest first, so that a start outlives what continues it.
        for start in reversed(starts):
            self._url_of[start] = chosen.url
            self._url_of.move_to_end(start)
        while len(self._url_of) > self._max_blocks:
            self._url_of.popitem(last=False)
        return chosen

    def forget(self) -> None:
        self._url_of.clear()

    @property
    def num_blocks(self) -> int:
        return len(self._url_of)

    def _matched(self, workers: Sequence[Snapshot], starts: Sequence[int]) -> Snapshot | None:
        by_url = {worker.url: worker for worker in workers}
        matched, length = None, 0
        for index, start in enumerate(starts):
            if start not in self._url_of:
                break
            worker = by_url.get(self._url_of[start])
            if worker is not None:
                matched, length = worker, index + 1
        return matched if length >= MIN_MATCHED_SHARE * len(starts) else None


def _is_overloaded(worker: Snapshot, least: Snapshot) -> bool:
    count, fewest = worker.num_requests_in_all, least.num_requests_in_all
    return count > fewest * MAX_LOAD_RATIO and count > fewest + MAX_EXTRA_REQUESTS


def _hashes_of_starts(prompt: bytes) -> list[int]:
    """Of one block, two blocks and so on; what is left over cannot fill a page."""
    end = min(len(prompt), MAX_PROMPT_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    hashes, last = [], 0
    for begin in range(0, end, BLOCK_BYTES):
        last = hash((last, prompt[begin : begin + BLOCK_BYTES]))
        hashes.append(last)
    return hashes


POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "cache_aware": CacheAware,
}
