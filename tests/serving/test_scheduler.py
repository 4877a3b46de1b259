"""The scheduler against a simulated engine: whatever arrives, every rule of a step holds."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.lockstep import Proposal, Rebalance, decide
from serving.pages import PagePool
from serving.request import Phase, Request, SamplingParams
from serving.scheduler import (
    Limits,
    ScheduledBatch,
    ScheduledDecode,
    ScheduledPrefill,
    Scheduler,
    StepPhase,
)


PAGE = 4
CONTEXT = 24


def make_request(name: str, prompt: int | list[int], new_tokens: int, **options: object) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens, **options)
    prompt_ids = [1] * prompt if isinstance(prompt, int) else list(prompt)
    return Request(name, prompt_ids, params, sink=lambda output: None)


@dataclasses.dataclass
class World:
    """A scheduler, its limits and what the engine would have done so far.

    `memory[rank]` has, for each (page, offset), the tokens whose state was last written there.
    """

    num_ranks: int = 2
    num_pages: int = 9
    max_running: int = 3
    chunk_tokens: int = 8
    extra_pages: int = 2
    prefix_cache: bool = False

    def __post_init__(self):
        self.limits = Limits(
            self.max_running, self.chunk_tokens, CONTEXT // PAGE + self.extra_pages
        )
        self.pools = [PagePool(self.num_pages, PAGE) for _ in range(self.num_ranks)]
        self.scheduler = Scheduler(self.pools, self.limits, prefix_cache=self.prefix_cache)
        self.memory: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in self.pools]
        self.num_computed = 0
        self.done: list[Request] = []
        self.steps: list[StepPhase] = []

    def next(self) -> ScheduledBatch | None:
        """As a group of one member decides it."""
        work = self.scheduler.propose()
        proposal = Proposal(work.prefill_tokens, work.decode_rows)
        decision = decide([proposal], self.steps[-1] if self.steps else None)
        if decision.phase is None:
            return None
        self.steps.append(decision.phase)
        batch = self.scheduler.next(decision.phase)
        if isinstance(batch, ScheduledPrefill):
            assert decision.phase is StepPhase.PREFILL
            fullest = max(sum(c.stop - c.start for c in chunks) for chunks in batch.chunks)
            assert fullest == decision.size
        else:
            assert decision.phase is StepPhase.DECODE
            assert max(map(len, batch.requests)) <= decision.size
        assert batch.all_requests
        return batch

    def step(self) -> bool:
        batch = self.next()
        if batch is None:
            return False
        if isinstance(batch, ScheduledPrefill):
            self.run_prefill(batch)
        else:
            self.run_decode(batch)
        self.scheduler.check_integrity()
        return True

    def run_prefill(self, batch: ScheduledPrefill) -> None:
        for rank, chunks in enumerate(batch.chunks):
            assert sum(c.stop - c.start for c in chunks) <= self.limits.chunk_tokens
            assert sum(-(-c.stop // PAGE) for c in chunks) <= self.limits.chunk_pages
            assert len(chunks) <= self.limits.max_running
            for chunk in chunks:
                request = chunk.request
                assert request.rank == rank and request.phase is Phase.PREFILL
                assert request.num_computed == chunk.start < chunk.stop
                assert len(request.pages) * PAGE >= chunk.stop
                self.write(request, chunk.start, chunk.stop)
        for chunk in [chunk for chunks in batch.chunks for chunk in chunks]:
            self.read(chunk.request, chunk.stop)
        for chunks in batch.chunks:
            for chunk in chunks:
                request = chunk.request
                self.scheduler.advance(request, chunk.stop)
                if chunk.is_last:
                    request.move_to(Phase.DECODE)
                    self.take_token(request)

    def run_decode(self, batch: ScheduledDecode) -> None:
        for rank, requests in enumerate(batch.requests):
            assert len(requests) <= self.limits.max_running
            for request in requests:
                assert request.rank == rank and request.phase is Phase.DECODE
                assert request.num_computed == request.num_tokens - 1
                assert len(request.pages) * PAGE >= request.num_tokens
                self.write(request, request.num_tokens - 1, request.num_tokens)
                self.read(request, request.num_tokens)
        for request in batch.all_requests:
            self.scheduler.advance(request, request.num_tokens)
            self.take_token(request)

    def write(self, request: Request, start: int, stop: int) -> None:
        others = {
            page
            for other in self.scheduler.running[request.rank]
            if other is not request
            for page in other.pages
        }
        for position in range(start, stop):
            page = request.pages[position // PAGE]
            assert page not in others and position // PAGE >= request.num_shared_pages
            state = tuple(request.tokens(0, position + 1))
            self.memory[request.rank][page, position % PAGE] = state
        self.num_computed += stop - start

    def read(self, request: Request, stop: int) -> None:
        """What attention over the first `stop` tokens reads must be theirs."""
        for position in range(stop):
            place = request.pages[position // PAGE], position % PAGE
            assert self.memory[request.rank][place] == tuple(request.tokens(0, position + 1))

    def take_token(self, request: Request) -> None:
        request.output_ids.append(sum(request.prompt_ids) % 2)
        if len(request.output_ids) >= request.params.max_new_tokens:
            self.scheduler.remove(request, Phase.DONE)
            self.done.append(request)

    def run_all(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                break
        else:
            pytest.fail("the scheduler does not come to an end")
        assert self.scheduler.num_running == len(self.scheduler.waiting) == 0
        assert self.scheduler.page_usage == 0
        self.scheduler.forget_cached()
        assert all(pool.num_free == pool.num_usable for pool in self.pools)


prompts = st.one_of(st.integers(1, 16), st.lists(st.integers(0, 1), min_size=1, max_size=16))
lengths = st.tuples(prompts, st.integers(1, CONTEXT - 16))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(lengths, max_size=25),
    st.integers(1, 3),
    st.integers(CONTEXT // PAGE + 1, 14),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_everything_finishes_within_limits(
    requests, ranks, pages, running, chunk, extra, prefix_cache, rng
):
    """Requests arrive and are cancelled at random; the rest all get their tokens."""
    world = World(ranks, pages, running, chunk, extra, prefix_cache)
    pending = [make_request(str(i), *sizes) for i, sizes in enumerate(requests)]
    live, cancelled = [], set()
    rng: random.Random
    while pending:
        for _ in range(rng.randint(0, 3)):
            if pending:
                live.append(pending.pop())
                world.scheduler.add(live[-1])
        world.step()
        if live and rng.random() < 0.2:
            victim = rng.choice(live)
            if not victim.is_finished:
                world.scheduler.remove(victim, Phase.FAILED)
                cancelled.add(victim.rid)
    world.run_all()
    assert prefix_cache or world.scheduler.num_cached_tokens == 0
    for request in live:
        assert (request.cached_tokens or 0) < len(request.prompt_ids)
        if request.rid not in cancelled:
            assert len(request.output_ids) == request.params.max_new_tokens


def test_prefill_has_priority_and_decode_follows_each_chunk():
    world = World(num_ranks=1, chunk_tokens=4, num_pages=20)
    world.scheduler.add(make_request("short", 4, 8))
    world.step()
    world.scheduler.add(make_request("long", 12, 1))
    for _ in range(6):
        world.step()
    prefill, decode = StepPhase.PREFILL, StepPhase.DECODE
    assert world.steps == [prefill, decode, prefill, decode, prefill, decode, prefill]


def test_requests_go_to_the_rank_with_the_least_to_do():
    world = World(num_ranks=4, chunk_tokens=16)
    requests = [make_request(str(i), 4, 9) for i in range(4)]
    for request in requests:
        world.scheduler.add(request)
    world.step()
    assert sorted(request.rank for request in requests) == [0, 1, 2, 3]


def test_several_prompts_share_a_chunk():
    world = World(num_ranks=1, chunk_tokens=8, num_pages=20)
    for i in range(3):
        world.scheduler.add(make_request(str(i), 3, 2))
    batch = world.next()
    assert isinstance(batch, ScheduledPrefill)
    assert [(c.start, c.stop) for c in batch.chunks[0]] == [(0, 3), (0, 3), (0, 2)]


def test_the_youngest_is_retracted_and_keeps_its_tokens():
    world = World(num_ranks=1, num_pages=7, chunk_tokens=32)
    old, young = make_request("old", 8, 16), make_request("young", 8, 16)
    world.scheduler.add(old)
    world.scheduler.add(young)
    while not world.scheduler.num_retracted:
        assert world.step()
    assert young.phase is Phase.WAITING and old.phase is Phase.DECODE
    assert young.output_ids and young.pages == []
    world.run_all()
    assert [request.rid for request in world.done] == ["old", "young"]


def test_arrival_order_is_kept_even_if_a_later_request_would_fit():
    world = World(num_ranks=1, num_pages=7, chunk_tokens=32)
    first, large, small = (
        make_request("a", 12, 9),
        make_request("b", 16, 1),
        make_request("c", 1, 1),
    )
    world.scheduler.add(first)
    world.step()
    world.scheduler.add(large)
    world.scheduler.add(small)
    world.step()
    assert small.phase is Phase.WAITING
    world.run_all()


def run_alone(world: World, prompt: list[int], **options: object) -> Request:
    request = make_request("alone", prompt, 1, **options)
    world.scheduler.add(request)
    while not request.is_finished:
        assert world.step()
    return request


def one_rank(**options: int) -> World:
    return World(**{"num_ranks": 1, "num_pages": 20, "prefix_cache": True, **options})


@pytest.mark.parametrize(
    ("first", "again", "cached"),
    [
        (12, 12, 8),  # the last token is always computed
        (13, 13, 12),
        (12, 13, 12),
        (3, 3, 0),  # no full page
        (4, 5, 4),
        (5, 4, 0),
        (16, 6, 4),
    ],
)
def test_full_pages_are_found_again(first, again, cached):
    world = one_rank()
    tokens = list(range(16))
    assert run_alone(world, tokens[:first]).cached_tokens == 0
    before = world.num_computed
    assert run_alone(world, tokens[:again]).cached_tokens == cached
    assert world.num_computed - before == again - cached
    assert world.scheduler.num_prompt_tokens == first + again
    assert world.scheduler.num_cached_tokens == cached


def test_an_answer_is_found_by_the_next_turn():
    world = one_rank()
    request = make_request("first", [2, 3], 7)
    world.scheduler.add(request)
    while not request.is_finished:
        world.step()
    # Its last token was never computed: 8 of 9.
    assert run_alone(world, [*request.prompt_ids, *request.output_ids, 5]).cached_tokens == 8


@pytest.mark.parametrize(("start", "cached"), [(0, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)])
def test_prompt_logprobs_are_computed_from_where_they_are_wanted(start, cached):
    world = one_rank()
    run_alone(world, list(range(14)))
    options = {"prompt_logprobs": True, "prompt_logprobs_start": start}
    assert run_alone(world, list(range(14)), **options).cached_tokens == cached


def test_equal_prompts_at_a_time_come_to_share_their_pages():
    world = one_rank(max_running=4, chunk_tokens=32)
    requests = [make_request(str(i), list(range(10)), 5) for i in range(3)]
    for request in requests:
        world.scheduler.add(request)
    world.step()
    assert [request.cached_tokens for request in requests] == [0, 0, 0]
    assert len({tuple(request.pages[:2]) for request in requests}) == 1
    assert len({request.pages[2] for request in requests}) == 3
    late = make_request("late", list(range(10)), 2)
    world.scheduler.add(late)
    world.run_all()
    assert late.cached_tokens == 8


def test_cached_pages_give_way_to_requests_and_those_in_use_do_not():
    world = one_rank(num_pages=9, chunk_tokens=32)
    run_alone(world, [1] * 12)
    run_alone(world, [2] * 12)
    assert world.scheduler.num_cached_pages == 6 and world.scheduler.page_usage == 0
    using = make_request("using", [1] * 13, 3)
    world.scheduler.add(using)
    world.step()
    assert using.cached_tokens == 12
    world.scheduler.add(make_request("other", [3] * 9, 2))
    world.step()
    world.step()
    # Of 8 pages 4 are in use, 1 is free and 3 are kept; the other one's take all of these but one.
    assert world.scheduler.num_running == 2
    assert world.scheduler.num_evicted_pages == 2
    assert world.scheduler.num_cached_pages == 1
    world.run_all()
    assert world.scheduler.num_retracted == 0


def test_a_retracted_request_finds_its_own_pages_again():
    world = one_rank(num_pages=7, chunk_tokens=32)
    old, young = make_request("old", [1] * 8, 16), make_request("young", [2] * 8, 16)
    world.scheduler.add(old)
    world.scheduler.add(young)
    while not world.scheduler.num_retracted:
        assert world.step()
    world.scheduler.remove(old, Phase.FAILED)
    computed = young.num_tokens - 1
    before = world.num_computed
    assert world.step()
    # All but what its neighbour took, and the tokens of no full page.
    assert world.num_computed - before <= computed % PAGE + 1 + PAGE
    assert young.cached_tokens == 0
    world.run_all()


@pytest.mark.parametrize("num_busy", [1, 2])
def test_the_rank_with_the_prefix_is_preferred_unless_it_has_much_more_to_do(num_busy):
    """max_running 4 allows it one request more than the other."""
    world = World(num_pages=30, max_running=4, chunk_tokens=32, prefix_cache=True)

    def admit(name: str) -> Request:
        request = make_request(name, list(range(13)), 9)
        world.scheduler.add(request)
        while request.rank < 0:
            world.step()
        return request

    ranks = {admit(f"busy {i}").rank for i in range(num_busy)}
    assert len(ranks) == 1
    request = admit("another")
    expected = (ranks.pop(), 12)
    if num_busy == 2:
        expected = (1 - expected[0], 0)
    assert (request.rank, request.cached_tokens) == expected
    world.run_all()


def test_what_is_cached_counts_as_done_when_ranks_are_compared():
    world = World(max_running=8, num_pages=30, chunk_tokens=32, extra_pages=8, prefix_cache=True)
    run_alone(world, list(range(17)))
    # At a time: 5 uncached tokens and then 1 are fewer than 17 on the other rank.
    long = make_request("long", [*range(16), 9, 9, 9, 9, 9], 1)
    short = make_request("short", list(range(17)), 1)
    world.scheduler.add(long)
    world.scheduler.add(short)
    world.step()
    assert long.cached_tokens == short.cached_tokens == 16


def test_an_illegal_phase_change_is_caught():
    request = make_request("a", 1, 1)
    with pytest.raises(RuntimeError, match="request a cannot go from"):
        request.move_to(Phase.DECODE)


@pytest.mark.parametrize(
    ("proposals", "last", "phase", "size"),
    [
        ([(0, 0), (0, 0)], None, None, 0),
        ([(5, 0), (9, 3)], None, StepPhase.PREFILL, 9),
        ([(5, 0), (9, 3)], StepPhase.DECODE, StepPhase.PREFILL, 9),
        ([(5, 0), (9, 3)], StepPhase.PREFILL, StepPhase.DECODE, 3),
        ([(5, 0), (9, 0)], StepPhase.PREFILL, StepPhase.PREFILL, 9),
        ([(0, 1), (0, 0)], StepPhase.DECODE, StepPhase.DECODE, 1),
    ],
)
def test_members_decide_on_one_phase_and_size(proposals, last, phase, size):
    for order in (proposals, proposals[::-1]):
        decision = decide([Proposal(*work) for work in order], last)
        assert (decision.phase, decision.size) == (phase, size)


def test_one_member_can_ask_for_anything_but_the_end():
    busy = Proposal(num_active=2, flush=1, stop=1)
    decision = decide([busy, Proposal(num_active=1, failed=1)], None)
    assert (decision.flush, decision.recover, decision.stop) == (True, True, False)
    assert decision.num_active == 3
    assert decide([busy, busy], None).stop


@pytest.mark.parametrize(
    ("wishes", "decided"),
    [
        ("WAIT WAIT", "WAIT"),
        ("WAIT GO_ON", "WAIT"),
        ("GO_ON GO_ON", "GO_ON"),
        ("GO_ON ABANDON", "ABANDON"),
        ("WAIT ABANDON", "ABANDON"),
    ],
)
def test_experts_move_when_all_are_ready_and_not_when_one_gives_up(wishes, decided):
    for order in (wishes.split(), wishes.split()[::-1]):
        proposals = [Proposal(rebalance=Rebalance[wish]) for wish in order]
        assert decide(proposals, None).rebalance is Rebalance[decided]


class Transfer:
    """Of a request's pages: cancelled once, or over."""

    def __init__(self) -> None:
        self.is_over = False

    def cancel(self) -> None:
        assert not self.is_over
        self.is_over = True


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_ranks=st.integers(1, 3), shares=st.booleans())
def test_what_is_fetched_has_pages_until_it_is_there(data, num_ranks, shares):
    """Requests whose latents come from elsewhere: any may come at any time, be aborted or lose its
    pages; then its transfer is cancelled before the pages are anyone else's."""
    pools = [PagePool(9, PAGE) for _ in range(num_ranks)]
    scheduler = Scheduler(pools, Limits(3, 8, 8), prefix_cache=shares, prefills=False)
    start = [1] * 6
    requests = [
        make_request(f"r{i}", start[: i % 7] + [i + 2] * (1 + i % 11), 1 + i % 9) for i in range(14)
    ]
    unsent, active = list(requests), []
    transfers: dict[Request, Transfer] = {}
    for _ in range(400):
        if unsent and data.draw(st.booleans()):
            active.append(unsent.pop())
            scheduler.add(active[-1])
        for request in scheduler.reserve():
            assert request.phase is Phase.TRANSFER
            assert len(request.pages) == -(-request.num_tokens // PAGE)
            assert request.num_computed % PAGE == 0 and request.num_computed < request.num_tokens
            request.incoming = transfers[request] = Transfer()
        held = [page for running in scheduler.running for r in running for page in r.pages]
        assert shares or len(held) == len({(r.rank, p) for r in active for p in r.pages})
        underway = [request for request in active if request.phase is Phase.TRANSFER]
        assert all(transfers[request].is_over is False for request in underway)
        if underway and data.draw(st.booleans()):
            request = data.draw(st.sampled_from(underway))
            if data.draw(st.integers(0, 5)) == 0:
                scheduler.remove(request, Phase.FAILED)
                active.remove(request)
                assert transfers[request].is_over and not request.pages
            else:
                request.incoming, transfers[request].is_over = None, True
                scheduler.advance(request, request.num_tokens)
                request.move_to(Phase.DECODE)
                request.output_ids.append(7)
        work = scheduler.propose()
        assert work.prefill_tokens == 0
        if work.decode_rows:
            batch = scheduler.next(StepPhase.DECODE)
            assert isinstance(batch, ScheduledDecode)
            for request in batch.all_requests:
                scheduler.advance(request, request.num_tokens)
                request.output_ids.append(7)
                if len(request.output_ids) > request.params.max_new_tokens:
                    scheduler.remove(request, Phase.DONE)
                    active.remove(request)
        scheduler.check_integrity()
        for request in active:
            if request.phase is Phase.WAITING and request in transfers:
                assert transfers[request].is_over, "it has lost its pages"
        if not unsent and not active:
            break
    for request in active:
        scheduler.remove(request, Phase.FAILED)
    scheduler.check_integrity()
    assert scheduler.page_usage == 0
