"""Policies as laws over any workers."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.policy import (
    BLOCK_BYTES,
    MAX_EXTRA_REQUESTS,
    MAX_PROMPT_BYTES,
    POLICIES,
    CacheAware,
    LeastLoad,
    RoundRobin,
)
from serving.router.pool import Role, Snapshot, State


def worker(url: str, num_requests: int = 0, num_tokens: int = 0, num_others: int = 0) -> Snapshot:
    return Snapshot(
        url=url, role=Role.PREFILL, state=State.ONLINE, is_static=True, transfer_address="p:1",
        model="m", page_size=64, num_requests=num_requests, num_tokens=num_tokens,
        num_others=num_others, num_failures=0, error=None,
    )  # fmt: skip


WORKERS = st.lists(
    st.builds(
        worker, st.sampled_from("abcdef"), st.integers(0, 30), st.integers(0, 9), st.integers(0, 3)
    ),
    min_size=1,
    unique_by=lambda worker: worker.url,
)
BLOCKS = st.lists(st.sampled_from(b"xyz"), max_size=6).map(
    lambda letters: b"".join(bytes([letter]) * BLOCK_BYTES for letter in letters)
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30)
@given(calls=st.lists(st.tuples(WORKERS, BLOCKS), max_size=10))
def test_chooses_one_of_the_workers(name, calls):
    policy = POLICIES[name]()
    for workers, prompt in calls:
        assert policy.choose(workers, prompt) in workers


@given(workers=WORKERS, num_rounds=st.integers(1, 5), data=st.data())
def test_round_robin_is_even_in_whatever_order_workers_come(workers, num_rounds, data):
    policy = RoundRobin()
    chosen = [
        policy.choose(data.draw(st.permutations(workers)), b"").url
        for _ in range(num_rounds * len(workers))
    ]
    assert all(chosen.count(worker.url) == num_rounds for worker in workers)


def test_round_robin_goes_on_when_workers_come_and_go():
    policy = RoundRobin()
    a, b, c, d = map(worker, "abcd")
    assert policy.choose([a, b, d], b"") is a
    assert policy.choose([b, c, d], b"") is b
    assert policy.choose([b, c, d], b"") is c
    assert policy.choose([a, b], b"") is a


@given(calls=st.lists(WORKERS, min_size=1, max_size=10))
def test_least_load_never_picks_a_more_loaded_worker(calls):
    policy = LeastLoad()
    for workers in calls:
        assert policy.choose(workers, b"").load == min(worker.load for worker in workers)


def test_least_load_takes_turns_among_equals():
    policy = LeastLoad()
    workers = [worker("a", num_tokens=1), worker("b"), worker("c")]
    assert [policy.choose(workers, b"").url for _ in range(4)] == ["b", "c", "b", "c"]


@given(workers=WORKERS, prompts=st.lists(BLOCKS, min_size=1), length=st.integers(1, 40))
def test_cache_aware_sends_equal_prefixes_to_the_same_worker(workers, prompts, length):
    """Any others in between, as long as the loads are balanced."""
    workers = [dataclasses.replace(worker, num_requests=0, num_others=0) for worker in workers]
    policy = CacheAware()
    start = b"s" * length * BLOCK_BYTES
    first = policy.choose(workers, start)
    for prompt in prompts:
        policy.choose(workers, prompt)
        continued = start + prompt[: length * BLOCK_BYTES] + b"the question"
        assert policy.choose(workers, continued) is first


def test_cache_aware_follows_the_longest_start():
    policy = CacheAware()
    a, b = worker("a"), worker("b")
    system, one, two = (letter * BLOCK_BYTES for letter in (b"s", b"1", b"2"))
    assert policy.choose([a], system + one) is a
    assert policy.choose([b], system + two) is b
    assert policy.choose([a, b], system + one + one) is a
    assert policy.choose([a, b], system + two + two) is b


def test_cache_aware_takes_the_least_load_when_little_matches():
    policy = CacheAware()
    a, b = worker("a", num_tokens=5), worker("b")
    start = b"s" * BLOCK_BYTES
    assert policy.choose([a], start) is a
    assert policy.choose([a, b], start + b"1" * BLOCK_BYTES) is a, "half of it"
    assert policy.choose([a, b], start + b"2" * BLOCK_BYTES * 2) is b, "a third of it"
    assert policy.choose([a, b], b"short") is b


def test_cache_aware_takes_the_least_load_when_loads_are_far_apart():
    policy = CacheAware()
    start, idle = b"s" * BLOCK_BYTES, worker("b")
    policy.choose([worker("a")], start)
    busy = worker("a", num_requests=MAX_EXTRA_REQUESTS, num_tokens=1)
    assert policy.choose([busy, idle], start) is busy
    busy = worker("a", num_requests=MAX_EXTRA_REQUESTS, num_others=1)
    assert policy.choose([busy, idle], start) is idle
    assert policy.choose([worker("a"), idle], start) is idle, "which has it now"
    busy, other = worker("a", num_requests=150), worker("b", num_requests=100)
    policy.forget()
    policy.choose([busy], start)
    assert policy.choose([busy, other], start) is busy, "one and a half times as many"


def test_cache_aware_forgets_workers_that_are_not_there_and_what_it_is_told_to():
    policy = CacheAware()
    a, b, c = worker("a"), worker("b"), worker("c", num_tokens=1)
    start = b"s" * BLOCK_BYTES
    policy.choose([c], start)
    assert policy.choose([a, b], start) is a
    policy.choose([c], start)
    policy.forget()
    assert policy.choose([b, c], start) is b


@given(prompts=st.lists(BLOCKS), max_blocks=st.integers(0, 8))
def test_cache_aware_is_bounded(prompts, max_blocks):
    policy = CacheAware(max_blocks)
    for prompt in prompts:
        policy.choose([worker("a")], prompt)
        assert policy.num_blocks <= max_blocks


def test_cache_aware_looks_at_a_bounded_part_and_keeps_what_is_used():
    policy = CacheAware(max_blocks=MAX_PROMPT_BYTES // BLOCK_BYTES + 2)
    a, b = worker("a"), worker("b")
    start = b"s" * BLOCK_BYTES * 2
    policy.choose([a], start)
    policy.choose([b], b"x" * 4 * MAX_PROMPT_BYTES)
    assert policy.num_blocks == MAX_PROMPT_BYTES // BLOCK_BYTES + 2
    assert policy.choose([a, b], start) is a
    policy.choose([b], b"y" * 4 * MAX_PROMPT_BYTES)
    assert policy.choose([a, b], start) is a, "what was not used went first"
