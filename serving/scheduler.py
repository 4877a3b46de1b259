"""What the next step computes. Host logic over lengths and pages; never sees an array.

A step is either a prefill of chunks of prompts or a decode of one token for every request that is
past its prompt, on all ranks at once (dispatch is collective, so the ranks share a phase). The
scheduler says what it could do in either phase and then makes the batch of the one it is told; the
choice, `serving.lockstep`, is one for all members of a group.

Requests are admitted in order of arrival to the rank with the least to do, where what the rank's
prefix cache has of a request need not be done. When a rank runs out of pages, its youngest request
gives its pages back and waits at the front of the queue; its tokens are kept and prefilled again,
so its answer is the same.
"""

import dataclasses
import enum
import sys
from collections import deque

from serving.pages import PagePool
from serving.prefix_cache import PrefixCache, page_keys
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

    def __init__(self, limits: Limits, cache: PrefixCache, running: list[Request]):
        self.chunks: list[Chunk] = []
        self.admitted: list[tuple[Request, list[int]]] = []
        """With the cached pages that the request starts with."""
        self.num_tokens = 0
        self.num_running = len(running)
        self.num_available = cache.num_available
        self._num_pages = 0
        self._limits = limits
        self._cache = cache
        self._claimed: set[int] = set()
        for request in running:
            if request.phase is Phase.PREFILL:
                self._add(request, request.num_computed)

    def find(self, keys: list[bytes]) -> list[int]:
        """The cached pages that a sequence of these page keys could start with."""
        return self._cache.match(keys)

    def can_admit(self, request: Request, prefix: list[int]) -> bool:
        # A page in reserve for each running request, or admission would only cause retraction.
        needed = self._num_taken(request, prefix) + self.num_running
        start = len(prefix) * self._cache.page_size
        return (
            self.num_running < self._limits.max_running
            and needed <= self.num_available
            and self._next_stop(request, start) > start
        )

    def admit(self, request: Request, prefix: list[int]) -> None:
        self.admitted.append((request, prefix))
        self.num_running += 1
        self.num_available -= self._num_taken(request, prefix)
        self._claimed.update(prefix)
        self._add(request, len(prefix) * self._cache.page_size)

    def _num_taken(self, request: Request, prefix: list[int]) -> int:
        """How many fewer pages are available once the request has its own."""
        claimed = sum(self._cache.is_unused(page) and page not in self._claimed for page in prefix)
        return claimed + self._cache.pages_for(request.num_tokens) - len(prefix)

    def _add(self, request: Request, start: int) -> None:
        """The next chunk of the request, as much of it as there is room for."""
        stop = self._next_stop(request, start)
        if stop > start:
            self.chunks.append(Chunk(request, start, stop))
            self.num_tokens += stop - start
            self._num_pages += self._cache.pages_for(stop)

    def _next_stop(self, request: Request, start: int) -> int:
        by_tokens = start + self._limits.chunk_tokens - self.num_tokens
        by_pages = (self._limits.chunk_pages - self._num_pages) * self._cache.page_size
        return min(request.num_tokens, by_tokens, by_pages)


class Scheduler:
    """`prefix_cache`: whether requests share the full pages of equal starts. `prefills`: whether
    steps compute their latents; otherwise `reserve` says whose are to be fetched.

    Attributes:
      num_retracted: times a request lost its pages to others.
      num_prompt_tokens, num_cached_tokens: of the requests admitted so far, and how many of these
        tokens were found cached.
    """

    def __init__(
        self,
        pools: list[PagePool],
        limits: Limits,
        *,
        prefix_cache: bool = True,
        prefills: bool = True,
    ):
        self.waiting: deque[Request] = deque()
        self.running: list[list[Request]] = [[] for _ in pools]
        """By rank, oldest first; all hold pages."""
        self.num_retracted = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._caches = [PrefixCache(pool) for pool in pools]
        self._shares = prefix_cache
        # What is fetched comes whole.
        self._limits = limits if prefills else Limits(limits.max_running, sys.maxsize, sys.maxsize)
        self._prefills = prefills
        self._planned: list[_RankPrefill] = []

    @property
    def num_running(self) -> int:
        return sum(map(len, self.running))

    @property
    def num_transferring(self) -> int:
        """Of those, how many are waiting for their latents from elsewhere."""
        running = (request for of_rank in self.running for request in of_rank)
        return sum(request.phase is Phase.TRANSFER for request in running)

    @property
    def page_usage(self) -> float:
        """Share of all pages that requests hold."""
        usable = sum(cache.num_usable for cache in self._caches)
        return 1 - sum(cache.num_available for cache in self._caches) / usable

    @property
    def num_cached_pages(self) -> int:
        """Pages that no request holds and that are kept for those to come."""
        return sum(cache.num_unused for cache in self._caches)

    @property
    def num_evicted_pages(self) -> int:
        return sum(cache.num_evicted for cache in self._caches)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def propose(self) -> Work:
        """What `next` could give now; nothing is admitted yet."""
        self._planned = self._plan_prefill() if self._prefills else []
        return Work(
            prefill_tokens=max((plan.num_tokens for plan in self._planned), default=0),
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
        self._admit_planned(planned, Phase.PREFILL)
        return ScheduledPrefill([plan.chunks for plan in planned])

    def reserve(self) -> list[Request]:
        """Admit waiting requests whose latents are now to be fetched, from `num_computed` tokens
        on, into their pages; `advance` says when all have come."""
        assert not self._prefills
        return self._admit_planned(self._plan_prefill(), Phase.TRANSFER)

    def advance(self, request: Request, num_computed: int) -> None:
        """A step has brought the request's first `num_computed` tokens into its pages."""
        request.num_computed = num_computed
        if not self._shares:
            return
        cache, shared = self._caches[request.rank], request.num_shared_pages
        full = num_computed // cache.page_size
        if full > shared:
            tokens = request.tokens(shared * cache.page_size, full * cache.page_size)
            keys = page_keys(tokens, cache.page_size)
            own = request.pages[shared:full]
            request.pages[shared:full] = cache.insert(request.pages[:shared], keys, own)
            request.num_shared_pages = full

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

    def forget_cached(self) -> None:
        """Empty the prefix caches, since the latents are gone; no request may hold pages."""
        for cache in self._caches:
            cache.clear()

    def check_integrity(self) -> None:
        """Every page is free, has one owner, or is shared by those that are counted. Cheap; run
        whenever the loop is idle."""
        for rank, cache in enumerate(self._caches):
            running = self.running[rank]
            paths = [request.pages[: request.num_shared_pages] for request in running]
            owned = [page for r in running for page in r.pages[r.num_shared_pages :]]
            if error := cache.check(paths, owned):
                raise RuntimeError(f"rank {rank}: {error}")

    def _release(self, request: Request) -> None:
        if request.incoming is not None:
            request.incoming.cancel()
            request.incoming = None
        self.running[request.rank].remove(request)
        cache, shared = self._caches[request.rank], request.num_shared_pages
        cache.release(request.pages[:shared])
        cache.free(request.pages[shared:])
        request.pages, request.num_shared_pages, request.rank = [], 0, -1

    def _plan_prefill(self) -> list[_RankPrefill]:
        plans = [
            _RankPrefill(self._limits, cache, running)
            for cache, running in zip(self._caches, self.running, strict=True)
        ]
        for request in self.waiting:
            tokens = request.tokens(0, request.num_reusable) if self._shares else []
            keys = page_keys(tokens, self._caches[0].page_size)
            prefixes = [(plan, plan.find(keys)) for plan in plans]
            able = [(plan, prefix) for plan, prefix in prefixes if plan.can_admit(request, prefix)]
            if not able:
                break
            plan, prefix = self._best(able)
            plan.admit(request, prefix)
        return plans

    def _best(self, able: list[tuple[_RankPrefill, list[int]]]) -> tuple[_RankPrefill, list[int]]:
        """The rank with the fewest tokens to prefill once it has a request, whose cached prefix is
        beside it, then with the fewest requests.

        A prefix does not count on a rank that has over a quarter of `max_running`, and over 1, more
        requests than another: all ranks wait for the one that decodes the most.
        """
        fewest = min(plan.num_running for plan, _ in able)
        most = fewest + max(1, self._limits.max_running // 4)

        def cost(choice: tuple[_RankPrefill, list[int]]) -> tuple[int, int, int]:
            plan, prefix = choice
            cached = len(prefix) if plan.num_running <= most else 0
            num_tokens = plan.num_tokens - cached * self._caches[0].page_size
            return num_tokens, plan.num_running, -plan.num_available

        return min(able, key=cost)

    def _admit_planned(self, planned: list[_RankPrefill], phase: Phase) -> list[Request]:
        for rank, plan in enumerate(planned):
            # All of them first: pages for one must not be the start of another.
            for _, prefix in plan.admitted:
                self._caches[rank].use(prefix)
            for request, prefix in plan.admitted:
                self._admit(request, rank, prefix)
                request.move_to(phase)
        return [request for plan in planned for request, _ in plan.admitted]

    def _admit(self, request: Request, rank: int, prefix: list[int]) -> None:
        """Give the request its pages on a rank, after the cached ones that it already uses."""
        cache = self._caches[rank]
        self.waiting.remove(request)
        request.rank = rank
        request.num_computed = len(prefix) * cache.page_size
        request.num_shared_pages = len(prefix)
        num_own = cache.pages_for(request.num_tokens) - len(prefix)
        request.pages = prefix + cache.allocate(num_own)
        if request.cached_tokens is None:
            request.cached_tokens = request.num_computed
            self.num_prompt_tokens += request.num_tokens
            self.num_cached_tokens += request.num_computed
        self.running[rank].append(request)

    def _decoding(self) -> list[list[Request]]:
        return [[r for r in running if r.phase is Phase.DECODE] for running in self.running]

    def _next_decode(self) -> ScheduledDecode:
        for rank in range(len(self._caches)):
            self._grow(rank)
        return ScheduledDecode(self._decoding())

    def _grow(self, rank: int) -> None:
        """Give each decoding request of the rank the page its next token needs."""
        cache, running = self._caches[rank], self.running[rank]
        for request in list(running):  # oldest first
            if request.phase is not Phase.DECODE:
                continue
            missing = cache.pages_for(request.num_tokens) - len(request.pages)
            while request.rank == rank and missing > cache.num_available:
                self.retract(running[-1])  # the youngest, in the end the request itself
            if request.rank == rank and missing > 0:
                request.pages += cache.allocate(missing)
