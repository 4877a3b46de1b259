"""What the next step computes. Host logic over lengths and pages; never sees an array.

A step is either a prefill of chunks of prompts or a decode of one token for every request that is
past its prompt, on all ranks at once (dispatch is collective, so the ranks share a phase). The
scheduler says what it could do in either phase and then makes the batch of the one it is told; the
choice, `serving.lockstep`, is one for all members of a group.

Requests are admitted in order of arrival to the rank with the least to do. When a rank runs out of
pages, its youngest request gives its pages back and waits at the front of the queue; its tokens
are kept and prefilled again, so its answer is the same.
"""

import dataclasses
import enum
from collections import deque

from serving.pages import PagePool
from serving.request import Phase, Request


class StepPhase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


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


@dataclasses.dataclass(frozen=True)
class Work:
    """What the next step could be: tokens of a prefill and rows of a decode, of the fullest rank.

    0 is nothing. A decode may turn out smaller, since it can run out of pages.
    """

    prefill_tokens: int
    decode_rows: int


class _RankPrefill:
    """One rank's part of a prefill step, within its limits. A plan: it changes no request."""

    def __init__(self, limits: Limits, pool: PagePool, running: list[Request]):
        self.chunks: list[Chunk] = []
        self.admitted: list[Request] = []
        self.num_tokens = 0
        self.num_running = len(running)
        self.num_free = pool.num_free
        self._num_pages = 0
        self._limits = limits
        self._pool = pool
        for request in running:
            if request.phase is Phase.PREFILL:
                self.add(request)

    def can_admit(self, request: Request) -> bool:
        # A page in reserve for each running request, or admission would only cause retraction.
        needed = self._pool.pages_for(request.num_tokens) + self.num_running
        return (
            self.num_running < self._limits.max_running
            and needed <= self.num_free
            and self._next_stop(request) > request.num_computed
        )

    def admit(self, request: Request) -> None:
        self.admitted.append(request)
        self.num_running += 1
        self.num_free -= self._pool.pages_for(request.num_tokens)
        self.add(request)

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
        self._planned: list[_RankPrefill] = []

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

    def propose(self) -> Work:
        """What `next` could give now; nothing is admitted yet."""
        self._planned = self._plan_prefill()
        return Work(
            prefill_tokens=max(plan.num_tokens for plan in self._planned),
            decode_rows=max(map(len, self._decoding())),
        )

    def next(self, phase: StepPhase) -> ScheduledBatch:
        """The batch of a step of this phase, as just proposed; empty when there was no such work.

        Requests are admitted, or retracted, for it.
        """
        if phase is StepPhase.DECODE:
            return self._next_decode()
        planned, self._planned = self._planned, []
        assert planned, "propose comes first"
        for rank, plan in enumerate(planned):
            for request in plan.admitted:
                self._admit(request, rank)
        return ScheduledPrefill([plan.chunks for plan in planned])

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

    def _plan_prefill(self) -> list[_RankPrefill]:
        plans = [
            _RankPrefill(self._limits, pool, running)
            for pool, running in zip(self._pools, self.running, strict=True)
        ]
        for request in self.waiting:
            able = [plan for plan in plans if plan.can_admit(request)]
            if not able:
                break
            least = min(able, key=lambda plan: (plan.num_tokens, plan.num_running, -plan.num_free))
            least.admit(request)
        return plans

    def _admit(self, request: Request, rank: int) -> None:
        pool = self._pools[rank]
        self.waiting.remove(request)
        request.rank = rank
        request.pages = pool.allocate(pool.pages_for(request.num_tokens))
        request.move_to(Phase.PREFILL)
        self.running[rank].append(request)

    def _decoding(self) -> list[list[Request]]:
        return [[r for r in running if r.phase is Phase.DECODE] for running in self.running]

    def _next_decode(self) -> ScheduledDecode:
        for rank in range(len(self._pools)):
            self._grow(rank)
        return ScheduledDecode(self._decoding())

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
