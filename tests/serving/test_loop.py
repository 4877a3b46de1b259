"""The loop on a real engine: answers, cancellation, limits, failures."""

import dataclasses
import random
import time

import numpy as np
import pytest

from serving.engine import logit_edits
from serving.loop import QueueFullError
from serving.peers import Alone
from serving.request import Request, SamplingParams


GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def make_prompts(count: int, seed: int = 0, longest: int = 100) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 256, n).tolist() for n in rng.integers(1, longest, count)]


def assorted(index: int) -> SamplingParams:
    """Parameters that differ from request to request."""
    return SamplingParams(
        max_new_tokens=8 + index % 9,
        temperature=(0.0, 1.0, 0.7)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        top_k=(0, 20)[index % 2],
        min_p=(0.0, 0.05)[index % 4 == 3],
        seed=index,
        ignore_eos=True,
        frequency_penalty=0.5 if index % 5 == 0 else 0.0,
        logit_bias={index: 2.0} if index % 7 == 0 else {},
    )


def test_alone_and_among_others_gives_the_same_tokens(client):
    prompts = make_prompts(32)
    together = client.run(prompts, [assorted(i) for i in range(32)])
    assert {answer.finish_reason for answer in together} == {"length"}
    for i, answer in enumerate(together):
        assert len(answer.token_ids) == assorted(i).max_new_tokens
        alone = client.run([prompts[i]], [assorted(i)])[0]
        assert alone.token_ids == answer.token_ids


def test_retraction_changes_no_answer(client):
    """40 pages of 8 tokens on a rank cannot hold 8 sequences of 100."""
    prompts = make_prompts(32, longest=40)
    params = dataclasses.replace(GREEDY, max_new_tokens=80)
    answers = client.run(prompts, [params] * 32)
    assert client.metric("num_retracted_reqs") > 0
    for prompt, answer in list(zip(prompts, answers, strict=True))[::5]:
        assert client.run([prompt], [params])[0].token_ids == answer.token_ids


def test_random_cancellations_leave_every_page_free(client):
    """The fixture checks the pages; here, that everything ends and the survivors are right."""
    rng = random.Random(0)
    prompts = make_prompts(200, seed=1, longest=60)
    answers = []
    for start in range(0, 200, 20):
        batch = prompts[start : start + 20]
        answers += client.submit(batch, [dataclasses.replace(GREEDY, max_new_tokens=6)] * 20)
        while client.loop.num_waiting > 60 and client.loop.error is None:
            time.sleep(0.005)
        for answer in rng.sample(answers[-20:], 8):
            client.loop.abort(answer.request.rid)
    reasons = [answer.wait().finish_reason for answer in answers]
    assert set(reasons) == {"abort", "length"}
    survivors = [i for i, reason in enumerate(reasons) if reason == "length"]
    for i in survivors[::25]:
        params = dataclasses.replace(GREEDY, max_new_tokens=6)
        assert client.run([prompts[i]], [params])[0].token_ids == answers[i].token_ids


def test_a_cancelled_request_is_gone_within_one_step(client):
    long, other = client.submit(
        make_prompts(2, longest=10), [dataclasses.replace(GREEDY, max_new_tokens=100)] * 2
    )
    long.first.wait(60)
    assert client.loop.abort(long.request.rid)
    long.wait()
    at_abort = len(other.token_ids)
    assert long.finish_reason == "abort"
    assert len(long.token_ids) <= at_abort + 1
    assert other.wait().finish_reason == "length"
    assert not client.loop.abort(long.request.rid)


def test_end_tokens_and_stop_tokens(client):
    prompt = make_prompts(1)[0]
    tokens = client.run([prompt], [GREEDY])[0].token_ids
    stop_at = tokens[5]
    params = dataclasses.replace(GREEDY, stop_token_ids=frozenset({stop_at}))
    answer = client.run([prompt], [params])[0]
    assert answer.finish_reason == "stop" and answer.outputs[-1].matched_stop == stop_at
    assert answer.token_ids == tokens[: tokens.index(stop_at) + 1]
    assert answer.outputs[-1].text == ""
    # Token 1 is the model's end token; force it.
    forced = dataclasses.replace(GREEDY, logit_bias={1: 100.0}, ignore_eos=False)
    answer = client.run([prompt], [forced])[0]
    assert (answer.finish_reason, answer.token_ids) == ("stop", [1])
    answer = client.run([prompt], [dataclasses.replace(forced, ignore_eos=True)])[0]
    assert (answer.finish_reason, answer.token_ids) == ("length", [1] * 12)


def test_the_context_length_ends_an_answer(client):
    params = dataclasses.replace(GREEDY, max_new_tokens=1000)
    answer = client.run([[5] * 120], [params])[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 8)


def test_logprobs_of_prompt_and_answer_agree_with_scoring_them(client):
    """Scoring prompt + answer as a prompt gives the log-probabilities the answer came with."""
    prompt = make_prompts(1, seed=4, longest=70)[0]
    params = dataclasses.replace(GREEDY, logprobs=True, num_top_logprobs=3, prompt_logprobs=True)
    answer = client.run([prompt], [params])[0]
    generated = [entry for output in answer.outputs for entry in output.logprobs]
    scored = answer.outputs[0].prompt_logprobs
    assert [entry.token_id for entry in scored] == prompt
    assert scored[0].logprob is None and all(entry.logprob <= 0 for entry in scored[1:])
    for entry in [*scored[1:], *generated]:
        assert len(entry.top) == 3
        assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])
    assert all(entry.top[0][0] == entry.token_id for entry in generated)  # greedy
    whole = dataclasses.replace(params, max_new_tokens=0)
    rescored = client.run([prompt + answer.token_ids], [whole])[0].outputs[0].prompt_logprobs
    want = [entry.logprob for entry in [*scored[1:], *generated]]
    np.testing.assert_allclose([entry.logprob for entry in rescored[1:]], want, atol=1e-4)


def test_zero_new_tokens_only_scores(client):
    params = dataclasses.replace(GREEDY, max_new_tokens=0, prompt_logprobs=True)
    answer = client.run([[3, 4, 5]], [params])[0]
    assert (answer.finish_reason, answer.token_ids) == ("length", [])
    assert len(answer.outputs[0].prompt_logprobs) == 3


def test_penalties_are_openais():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: 2.0})
    request = Request("a", [3, 3], params, sink=lambda output: None, output_ids=[3, 3, 7])
    edits = logit_edits(request, 10)
    np.testing.assert_allclose(edits[[3, 7, 0]], [2.0 - 2 * 0.5 - 0.25, -0.75, 0.0])


def test_a_full_queue_refuses_all_of_a_submission(client):
    with pytest.raises(QueueFullError, match="100 may; 101 more do not fit"):
        client.submit([[2]] * 101, [GREEDY] * 101)
    assert client.loop.num_waiting == 0
    assert client.run([[2]], [GREEDY])[0].finish_reason == "length"


def test_an_id_in_use_is_refused(client):
    answer = client.submit([[2]], [dataclasses.replace(GREEDY, max_new_tokens=60)])[0]
    with pytest.raises(ValueError, match="rid 'request-1' is in use"):
        client.loop.submit([answer.request])
    answer.wait()


def test_flushing_waits_for_no_one_and_compiles_nothing(client):
    answer = client.submit([[2, 3]], [dataclasses.replace(GREEDY, max_new_tokens=100)])[0]
    answer.first.wait(60)
    with pytest.raises(RuntimeError, match="requests are being served"):
        client.loop.flush_cache()
    client.loop.abort_all()
    answer.wait()
    before = client.run([[2, 3]], [GREEDY])[0].token_ids
    client.loop.flush_cache()
    assert client.run([[2, 3]], [GREEDY])[0].token_ids == before


# Around the pages of 8 tokens, the chunks of 32 and the two.
BORDERS = (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40, 41, 63, 64, 65, 72, 96, 97, 110)


def prompts_that_share() -> list[list[int]]:
    """Starts of one long prompt, and the same with an end of their own."""
    rng = np.random.default_rng(7)
    base = rng.integers(2, 256, 128).tolist()
    return [
        base[:length] + rng.integers(2, 256, own).tolist() for length in BORDERS for own in (0, 5)
    ]


def scored(index: int) -> SamplingParams:
    """Greedy with log-probabilities; of the prompt from the start, from its middle, or not."""
    return dataclasses.replace(
        GREEDY,
        max_new_tokens=(6, 1, 10, 3)[index % 4],
        logprobs=True,
        num_top_logprobs=2,
        prompt_logprobs=index % 3 > 0,
        prompt_logprobs_start=BORDERS[index // 2] // 2 if index % 3 == 2 else 0,
    )


@pytest.fixture
def without_cache(engine, new_client):
    """What the engine answers when nothing is cached. To be called before any other client's."""

    def answer(prompts, params):
        client = new_client(Alone(), engine, prefix_cache=False)
        client.loop.start()
        try:
            answers = client.run(prompts, params)
        finally:
            client.loop.shutdown()
        client.check_free()
        assert client.metric("cached_tokens_total") == 0
        assert all(answer.outputs[0].cached_tokens == 0 for answer in answers)
        return answers

    return answer


def num_equal(tokens: list[int], others: list[int]) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def check_same(answers, expected) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert answer.token_ids == other.token_ids
        for name in ("prompt_logprobs", "logprobs"):
            mine, theirs = (
                [entry for output in each.outputs for entry in getattr(output, name)]
                for each in (answer, other)
            )
            assert [entry.token_id for entry in mine] == [entry.token_id for entry in theirs]
            mine, theirs = (
                [np.nan if entry.logprob is None else entry.logprob for entry in entries]
                for entries in (mine, theirs)
            )
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_the_prefix_cache_changes_no_answer(client, without_cache):
    prompts = prompts_that_share()
    params = [scored(index) for index in range(len(prompts))]
    expected = without_cache(prompts, params)
    for prompt, param, answer in zip(prompts, params, expected, strict=True):
        assert len(answer.outputs[0].prompt_logprobs) == (
            len(prompt) - param.prompt_logprobs_start if param.prompt_logprobs else 0
        )
    one_by_one = [client.run([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    check_same(one_by_one, expected)
    earlier: list[list[int]] = [[]]
    for answer in one_by_one:
        prompt, param = answer.request.prompt_ids, answer.request.params
        start = param.prompt_logprobs_start if param.prompt_logprobs else len(prompt)
        longest = max(num_equal(prompt, other) for other in earlier)
        reusable = min(max(start - 1, 0), longest)
        assert answer.outputs[0].cached_tokens == reusable // 8 * 8
        earlier.append(prompt + answer.token_ids[:-1])
    together = client.run(prompts, params)
    check_same(together, expected)
    assert client.metric("cached_tokens_total") == sum(
        answer.outputs[0].cached_tokens for answer in [*one_by_one, *together]
    )
    total = 2 * sum(map(len, prompts))
    assert client.metric("prompt_tokens_total") == total
    assert client.metric("cache_hit_rate") == client.metric("cached_tokens_total") / total > 0.3


def test_eviction_and_retraction_change_no_answer(client, without_cache):
    """Families of prompts that no rank's 40 pages can all keep, some of them cancelled."""
    rng = np.random.default_rng(8)
    starts = [rng.integers(2, 256, 48).tolist() for _ in range(12)]
    prompts = [starts[i % 12] + rng.integers(2, 256, i % 20).tolist() for i in range(72)]
    params = [dataclasses.replace(GREEDY, max_new_tokens=40)] * len(prompts)
    expected = without_cache(prompts, params)
    answers = client.submit(prompts, params)
    for index, answer in enumerate(answers):
        if index % 9 == 4:
            answer.first.wait(60)
        if index % 3 == 0:
            client.loop.abort(answer.request.rid)
    for answer, other in zip(answers, expected, strict=True):
        tokens = answer.wait().token_ids
        assert tokens == other.token_ids[: len(tokens)]
        assert answer.finish_reason == "abort" or len(tokens) == 40
    assert {answer.finish_reason for answer in answers} == {"abort", "length"}
    for name in ("evicted_pages_total", "num_retracted_reqs", "cached_tokens_total"):
        assert client.metric(name) > 0


def test_what_was_cached_is_forgotten_when_it_is_flushed_or_lost(client, engine, monkeypatch):
    prompt = make_prompts(1, seed=2, longest=100)[0] + [5] * 16

    def ask() -> tuple[int, list[int]]:
        answer = client.run([prompt], [GREEDY])[0]
        return answer.outputs[0].cached_tokens, answer.token_ids

    full = (len(prompt) - 1) // 8 * 8
    _, tokens = ask()
    assert ask() == (full, tokens)
    client.loop.flush_cache()
    assert client.metric("cached_pages") == 0
    assert ask() == (0, tokens)
    assert ask() == (full, tokens)

    def fail(batch, size):
        monkeypatch.undo()
        raise RuntimeError("injected")

    monkeypatch.setattr(engine, "run", fail)
    assert client.run([[3]], [GREEDY])[0].finish_reason == "error"
    assert ask() == (0, tokens)


def test_a_failed_step_fails_its_requests_and_nothing_else(client, engine, monkeypatch):
    prompts = make_prompts(6, longest=20)
    expected = [client.run([prompt], [GREEDY])[0].token_ids for prompt in prompts]
    real, calls = engine.run, []

    def fail_once(batch, size):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return real(batch, size)

    monkeypatch.setattr(engine, "run", fail_once)
    first = client.submit(prompts[:3], [GREEDY] * 3)
    for answer in first:
        answer.first.wait(60)
    second = client.submit(prompts[3:], [GREEDY] * 3)
    answers = [answer.wait() for answer in [*first, *second]]
    failed = [answer for answer in answers if answer.finish_reason == "error"]
    assert failed and all(a.outputs[-1].error == "RuntimeError: injected" for a in failed)
    for answer, tokens in zip(answers, expected, strict=True):
        if answer not in failed:
            assert answer.token_ids == tokens
    assert client.run([prompts[0]], [GREEDY])[0].token_ids == expected[0]


def test_a_loop_that_keeps_failing_dies_and_says_so(client, engine, monkeypatch):
    def fail(batch, size):
        raise RuntimeError("injected")

    monkeypatch.setattr(engine, "run", fail)
    for _ in range(3):
        answer = client.run([[2]], [GREEDY])[0]
        assert answer.finish_reason == "error"
    client.loop._thread.join(10)
    assert "steps in a row failed" in client.loop.error
    with pytest.raises(RuntimeError, match="has stopped"):
        client.submit([[2]], [GREEDY])
    with pytest.raises(RuntimeError, match="has stopped"):
        client.loop.flush_cache()


def test_shutdown_lets_requests_finish(client):
    answer = client.submit([[2, 3]], [GREEDY])[0]
    client.loop.shutdown(drain_timeout=60.0)
    assert answer.finish_reason == "length"
    with pytest.raises(RuntimeError, match="shutting down"):
        client.submit([[2]], [GREEDY])


def test_shutdown_ends_what_does_not_finish_in_time(client):
    answers = client.submit([[2, 3]] * 50, [dataclasses.replace(GREEDY, max_new_tokens=100)] * 50)
    client.loop.shutdown(drain_timeout=0.0)
    assert {answer.wait(0).finish_reason for answer in answers} <= {"abort", "length"}
