"""What the next step computes. Host logic over lengths and pages; never sees an array.

A step is either a prefill of chunks of prompts or a decode of one token for every request that is
past its prompt, on all ranks at once (dispatch is collective, so the ranks share a phase). Prompts
have priority, but a decode step follows each prefill step as long as anything decodes: no stream
waits longer than one chunk.

Requests are admitted in order of arrival to the rank with the least to do. When a rank runs out of
pages, its youngest request gives its pages back and waits at the front of the queue; its tokens
are kept and prefilled again, so its answer is the same.
"""

import dataclasses
from collections import deque

from serving.pages import PagePool
from serving.request import Phase, Request


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a step, per rank.

    Attributes:
      max_running: requests that hold pages.
      chunk_tokens: tokens of a prefill step.
      chunk_pages: pages a prefill step reads; at least those of the longest sequence.
    """

    max_running: int
    chunk_tokens: int
    chunk_pages: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a request; the last chunk yields a token."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_tokens


@dataclasses.dataclass(frozen=True)
class ScheduledPrefill:
    """`chunks[rank]` in the order they are laid out."""

    chunks: list[list[Chunk]]

    @property
    def all_requests(self) -> list[Request]:
        return [chunk.request for of_rank in self.chunks for chunk in of_rank]


@dataclasses.dataclass(frozen=True)
class ScheduledDecode:
    """`requests[rank]`, one new token each."""

    requests: list[list[Request]]

    @property
    def all_requests(self) -> list[Request]:
        return [request for of_rank in self.requests for request in of_rank]


ScheduledBatch = ScheduledPrefill | ScheduledDecode


class _RankChunks:
    """The chunks of one rank's part of a prefill step, within its limits."""

    def __init__(self, limits: Limits, pool: PagePool):
        self.chunks: list[Chunk] = []
        self.num_tokens = 0
        self._num_pages = 0
        self._limits = limits
        self._pool = pool

    def has_room(self, request: Request) -> bool:
        return self._next_stop(request) > request.num_computed

    def add(self, request: Request) -> None:
        """The next chunk of the request, as much of it as there is room for."""
        stop = self._next_stop(request)
        if stop > request.num_computed:
            self.chunks.append(Chunk(request, request.num_computed, stop))
            self.num_tokens += stop - request.num_computed
            self._num_pages += self._pool.pages_for(stop)

    def _next_stop(self, request: Request) -> int:
        by_tokens = request.num_computed + self._limits.chunk_tokens - self.num_tokens
        by_pages = (self._limits.chunk_pages - self._num_pages) * self._pool.page_size
        return min(request.num_tokens, by_tokens, by_pages)


class Scheduler:
    def __init__(self, pools: list[PagePool], limits: Limits):
        self.waiting: deque[Request] = deque()
        self.running: list[list[Request]] = [[] for _ in pools]
        """By rank, oldest first; all hold pages."""
        self.num_retracted = 0
        self._pools = pools
        self._limits = limits
        self._decode_is_due = False

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running))

    @property
    def page_usage(self) -> float:
        """Share of all pages that requests hold."""
        usable = sum(pool.num_usable for pool in self._pools)
        return 1 - sum(pool.num_free for pool in self._pools) / usable

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next(self) -> ScheduledBatch | None:
        """The next step, or None when there is nothing to do."""
        if self._decode_is_due and (batch := self._next_decode()):
            self._decode_is_due = False
            return batch
        if batch := self._next_prefill():
            self._decode_is_due = True
            return batch
        return self._next_decode()

    def remove(self, request: Request, phase: Phase) -> None:
        """Take a request out for good, its pages with it."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self._release(request)
        request.move_to(phase)

    def retract(self, request: Request) -> None:
        """Take the pages of a running request and let it wait at the front."""
        self._release(request)
        request.num_computed = 0
        request.move_to(Phase.WAITING)
        self.waiting.appendleft(request)
        self.num_retracted += 1

    def check_integrity(self) -> None:
        """Every page is free or has one owner. Cheap; run whenever the loop is idle."""
        for rank, pool in enumerate(self._pools):
            owned = [page for request in self.running[rank] for page in request.pages]
            if len(owned) != len(set(owned)) or len(owned) + pool.num_free != pool.num_usable:
                raise RuntimeError(
                    f"rank {rank}: {len(owned)} pages are owned ({len(set(owned))} distinct) and "
                    f"{pool.num_free} free, but there are {pool.num_usable}"
                )

    def _release(self, request: Request) -> None:
        self.running[request.rank].remove(request)
        self._pools[request.rank].free(request.pages)
        request.pages, request.rank = [], -1

    def _next_prefill(self) -> ScheduledPrefill | None:
        builders = [_RankChunks(self._limits, pool) for pool in self._pools]
        for rank, requests in enumerate(self.running):
            for request in requests:
                if request.phase is Phase.PREFILL:
                    builders[rank].add(request)
        while self.waiting:
            request = self.waiting[0]
            rank = self._rank_for(request, builders)
            if rank is None:
                break
            self.waiting.popleft()
            self._admit(request, rank)
            builders[rank].add(request)
        chunks = [builder.chunks for builder in builders]
        return ScheduledPrefill(chunks) if any(chunks) else None

    def _rank_for(self, request: Request, builders: list[_RankChunks]) -> int | None:
        """The rank with the least to do among those that can take the request now."""

        def can_take(rank: int) -> bool:
            running, pool = self.running[rank], self._pools[rank]
            # A page in reserve for each running request, or admission would only cause retraction.
            reserve = len(running)
            return (
                len(running) < self._limits.max_running
                and pool.pages_for(request.num_tokens) + reserve <= pool.num_free
                and builders[rank].has_room(request)
            )

        able = [rank for rank in range(len(self._pools)) if can_take(rank)]
        if not able:
            return None
        return min(
            able,
            key=lambda rank: (
                builders[rank].num_tokens,
                len(self.running[rank]),
                -self._pools[rank].num_free,
            ),
        )

    def _admit(self, request: Request, rank: int) -> None:
        pool = self._pools[rank]
        request.rank = rank
        request.pages = pool.allocate(pool.pages_for(request.num_tokens))
        request.move_to(Phase.PREFILL)
        self.running[rank].append(request)

    def _next_decode(self) -> ScheduledDecode | None:
        for rank in range(len(self._pools)):
            self._grow(rank)
        requests = [[r for r in running if r.phase is Phase.DECODE] for running in self.running]
        return ScheduledDecode(requests) if any(requests) else None

    def _grow(self, rank: int) -> None:
        """Give each decoding request of the rank the page its next token needs."""
        pool, running = self._pools[rank], self.running[rank]
        for request in list(running):  # oldest first
            if request.phase is not Phase.DECODE:
                continue
            missing = pool.pages_for(request.num_tokens) - len(request.pages)
            while request.rank == rank and missing > pool.num_free:
                self.retract(running[-1])  # the youngest, in the end the request itself
            if request.rank == rank and missing > 0:
                request.pages += pool.allocate(missing)
