"""Two-batch overlap in the engine: the same answers, and what it counts."""

import dataclasses

import pytest

from custom_calls import runtime
from jaxmoe.plan import make_plans
from jaxmoe.step import join_ep_group
from serving.engine import Engine
from serving.peers import Alone
from serving.request import SamplingParams
from tests.serving.conftest import LIMITS
from tests.serving.test_loop import make_prompts


PARAMS = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True, prompt_logprobs=True)


@pytest.fixture(scope="module")
def overlapped(tiny_model):
    plans = make_plans(
        "auto",
        ep_size=4,
        slots_per_rank=tiny_model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
        moe_a2a_backend="loopback",
        two_batch_overlap=True,
    )
    join_ep_group(tiny_model, plans, max_tokens=LIMITS.chunk_tokens)
    engine = Engine(tiny_model, LIMITS, prefill=plans[0], decode=plans[1])
    engine.warmup(Alone())
    yield engine
    runtime.shutdown()


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
    before = dict(overlapped.overlap_counts)
    assert answers(new_client(Alone(), overlapped), prompts) == expected
    counts = {name: count - before[name] for name, count in overlapped.overlap_counts.items()}
    total = sum(map(len, prompts))
    prefilled = counts["prefill_first_half_tokens"] + counts["prefill_second_half_tokens"]
    assert prefilled == total and counts["prefill_steps"] > 0 and counts["decode_steps"] > 0
    assert counts["prefill_first_half_tokens"] > 0.3 * total
    assert counts["prefill_second_half_tokens"] > 0.3 * total
    # Steps of one request on a rank are not cut.
    assert 0 < counts["decode_second_half_tokens"] <= 9 * len(prompts)


def test_a_lone_request_is_decoded_whole(overlapped, new_client):
    before = dict(overlapped.overlap_counts)
    client = new_client(Alone(), overlapped)
    client.loop.start()
    client.run([[5]], [dataclasses.replace(PARAMS, max_new_tokens=4)])
    client.loop.shutdown()
    assert overlapped.overlap_counts["decode_steps"] == before["decode_steps"]
