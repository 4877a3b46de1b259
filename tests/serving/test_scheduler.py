"""The scheduler against a simulated engine: whatever arrives, every rule of a step holds."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.lockstep import Proposal, decide
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


def make_request(name: str, prompt: int, new_tokens: int) -> Request:
    params = SamplingParams(max_new_tokens=new_tokens)
    return Request(name, [1] * prompt, params, sink=lambda output: None)


@dataclasses.dataclass
class World:
    """A scheduler, its limits and what the engine would have done so far."""

    num_ranks: int = 2
    num_pages: int = 9
    max_running: int = 3
    chunk_tokens: int = 8
    extra_pages: int = 2

    def __post_init__(self):
        self.limits = Limits(
            self.max_running, self.chunk_tokens, CONTEXT // PAGE + self.extra_pages
        )
        self.pools = [PagePool(self.num_pages, PAGE) for _ in range(self.num_ranks)]
        self.scheduler = Scheduler(self.pools, self.limits)
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
                request.num_computed = chunk.stop
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
                request.num_computed = request.num_tokens
                self.take_token(request)

    def take_token(self, request: Request) -> None:
        request.output_ids.append(7)
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
        assert all(pool.num_free == pool.num_usable for pool in self.pools)


lengths = st.tuples(st.integers(1, 16), st.integers(1, CONTEXT - 16))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(lengths, max_size=25),
    st.integers(1, 3),
    st.integers(CONTEXT // PAGE + 1, 14),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_everything_finishes_within_limits(requests, ranks, pages, running, chunk, extra, rng):
    """Requests arrive and are cancelled at random; the rest all get their tokens."""
    world = World(ranks, pages, running, chunk, extra)
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
    for request in live:
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
