"""Two-batch overlap in the engine: the same answers, and what it counts."""

import dataclasses
import time

import pytest

from custom_calls import runtime
from jaxmoe.plan import make_plans
from jaxmoe.step import join_ep_group
from serving.engine import Engine
from serving.overlap import TwoBatchLimits, TwoBatchOverlap
from serving.peers import Alone
from serving.request import SamplingParams
from serving.scheduler import StepPhase
from tests.serving.conftest import LIMITS
from tests.serving.test_loop import make_prompts


MEASURED = TwoBatchLimits()
PARAMS = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True, prompt_logprobs=True)


@pytest.fixture(scope="module")
def plans(tiny_model):
    plans = make_plans(
        "auto",
        ep_size=4,
        slots_per_rank=tiny_model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
        moe_a2a_backend="loopback",
        two_batch_overlap=True,
    )
    join_ep_group(tiny_model, plans, max_tokens=LIMITS.chunk_tokens)
    yield plans
    runtime.shutdown()


def make_engine(tiny_model, plans, limits):
    engine = Engine(tiny_model, LIMITS, prefill=plans[0], decode=plans[1], two_batch_limits=limits)
    engine.warmup(Alone())
    return engine


@pytest.fixture(scope="module")
def overlapped(tiny_model, plans):
    return make_engine(tiny_model, plans, TwoBatchLimits(1, 1))


def answers(client, prompts):
    """Tokens, and the log-probabilities of the prompt, of each answer."""
    client.loop.start()
    try:
        found = client.run(prompts, [PARAMS] * len(prompts))
    finally:
        client.loop.shutdown()
    client.check_free()
    assert client.metric("compilations_after_ready") == 0
    return [(answer.token_ids, answer.outputs[0].prompt_logprobs) for answer in found]


def test_overlap_changes_no_answer(engine, overlapped, new_client):
    prompts = [*make_prompts(14, longest=70), [7], [3, 9]]
    expected = answers(new_client(Alone(), engine), prompts)
    before = dict(overlapped.overlap.counts)
    assert answers(new_client(Alone(), overlapped), prompts) == expected
    counts = {name: count - before[name] for name, count in overlapped.overlap.counts.items()}
    total = sum(map(len, prompts))
    prefilled = counts["prefill_first_half_tokens"] + counts["prefill_second_half_tokens"]
    assert prefilled == total and counts["prefill_steps"] > 0 and counts["decode_steps"] > 0
    assert counts["prefill_first_half_tokens"] > 0.3 * total
    assert counts["prefill_second_half_tokens"] > 0.3 * total
    # Steps of one request on a rank are not cut.
    assert 0 < counts["decode_second_half_tokens"] <= 9 * len(prompts)


def test_a_lone_request_is_decoded_whole(overlapped, new_client):
    before = dict(overlapped.overlap.counts)
    client = new_client(Alone(), overlapped)
    client.loop.start()
    client.run([[5]], [dataclasses.replace(PARAMS, max_new_tokens=4)])
    client.loop.shutdown()
    assert overlapped.overlap.counts["decode_steps"] == before["decode_steps"]


class OfTwo(Alone):
    """Peers of which the other one's steps take these microseconds, whole and in halves."""

    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs

    def agree(self, proposal):
        return [tuple(proposal), self.theirs]


def measured(gains, peers, limits=MEASURED, sizes=(1, 2, 4, 8)):
    """The sizes that are cut when these gain by it; what was run to find out."""
    overlap = TwoBatchOverlap(limits, [StepPhase.DECODE])
    ran = set()

    def run(size, is_split):
        ran.add((size, is_split))
        time.sleep(0.001 if is_split == (size in gains) else 0.004)

    open_sizes = [size for size in sizes if len(overlap.ways(StepPhase.DECODE, size)) == 2]
    overlap.measure(StepPhase.DECODE, sizes, run, peers)
    assert all(size in open_sizes for size, _ in ran)
    return [size for size in sizes if overlap.is_split(StepPhase.DECODE, size)]


def test_sizes_that_gain_are_found():
    assert measured({4, 8}, Alone()) == [4, 8]
    assert measured({1, 2, 4, 8}, Alone()) == [2, 4, 8]
    assert measured({4}, Alone()) == []  # a larger one does not
    # The slower member decides.
    assert measured({8}, OfTwo((9000, 8000))) == [2, 4, 8]
    assert measured({8}, OfTwo((8000, 9000))) == []


def test_what_is_said_is_not_measured():
    said = TwoBatchLimits(min_decode_requests=4)
    assert measured({2}, Alone(), said) == [4, 8]
    other = TwoBatchOverlap(said, [StepPhase.DECODE])
    assert other.ways(StepPhase.PREFILL, 64) == [False]
    assert other.ways(StepPhase.DECODE, 64) == [True]


def test_start_up_measures_and_compiles_both_ways(tiny_model, plans, overlapped, new_client):
    """Whatever is found to be faster, nothing is compiled later."""
    measuring = make_engine(tiny_model, plans, None)
    prompts = make_prompts(6, longest=40)
    assert answers(new_client(Alone(), measuring), prompts) == answers(
        new_client(Alone(), overlapped), prompts
    )
