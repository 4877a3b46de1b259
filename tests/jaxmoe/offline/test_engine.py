import dataclasses

import numpy as np
import pytest

from jaxmoe.compilations import CompilationCounter
from jaxmoe.offline import GenerationOptions, OfflineEngine, generate
from jaxmoe.offline.options import make_request


NEW_TOKENS = 12
GREEDY = GenerationOptions(max_new_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = dataclasses.replace(GREEDY, temperature=1.0, seed=7, top_p=0.95, top_k=100)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 7, 5, 90)
"""About the edges of pages (64) and chunks (32)."""


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def engine(model_dir):
    return OfflineEngine.load(model_dir, ep_size=4, batch_size=16, chunk_tokens=32)


@pytest.fixture(scope="module")
def greedy(engine, prompts):
    return engine.generate(prompts, GREEDY)


def test_results_are_in_the_order_of_the_prompts(greedy):
    assert [result.prompt_tokens for result in greedy] == list(LENGTHS)
    assert all(result.completion_tokens == NEW_TOKENS for result in greedy)
    assert all(result.finish_reason == "length" for result in greedy)


def test_decoding_equals_prefilling_one_token_more_each_time(engine, prompts, greedy):
    one = dataclasses.replace(GREEDY, max_new_tokens=1)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(NEW_TOKENS):
        for text, result in zip(texts, engine.generate(texts, one), strict=True):
            text.extend(result.token_ids)
    continued = [tuple(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]
    assert continued == [result.token_ids for result in greedy]


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_prompt_alone_gives_what_it_gives_in_a_batch(engine, prompts, options):
    together = engine.generate(prompts, options)
    for index in (0, 8):
        request = _request(engine, index, prompts[index], options)
        assert engine.run_batch([request], options) == [together[index]]


@pytest.mark.parametrize(
    ("ep_size", "deepep_mode", "chunk_tokens"), [(1, "low_latency", 512), (2, "normal", 512)]
)
def test_layout_over_devices_does_not_matter(
    model_dir, prompts, greedy, ep_size, deepep_mode, chunk_tokens
):
    other = OfflineEngine.load(
        model_dir,
        ep_size=ep_size,
        deepep_mode=deepep_mode,
        chunk_tokens=chunk_tokens,
        num_redundant_experts=2,
    )
    assert other.generate(prompts, GREEDY) == greedy


def test_seeds(engine, prompts):
    same_prompts = [prompts[3]] * 3
    first = engine.generate(same_prompts, SEEDED)
    assert first == engine.generate(same_prompts, SEEDED)
    assert len({result.token_ids for result in first}) == 3
    shifted = engine.generate(same_prompts, dataclasses.replace(SEEDED, seed=8))
    assert shifted[:2] == first[1:]


def test_each_request_has_its_own_limit(engine, prompts, greedy):
    requests = [
        _request(engine, index, prompt, GREEDY, max_new_tokens=index + 1)
        for index, prompt in enumerate(prompts)
    ]
    for index, result in enumerate(engine.run_batch(requests, GREEDY)):
        assert result.token_ids == greedy[index].token_ids[: index + 1]


def test_stop_tokens_end_a_text_and_are_not_in_it(engine, prompts, greedy):
    stop = greedy[4].token_ids[5]
    options = dataclasses.replace(GREEDY, stop_token_ids=(stop,))
    for result, unstopped in zip(engine.generate(prompts, options), greedy, strict=True):
        ids = unstopped.token_ids
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert result.token_ids == ids[:end]
        assert result.finish_reason == ("stop" if stop in ids else "length")
        assert result.text == engine.tokenizer.decode(ids[: end - 1] if stop in ids else ids)


def test_the_models_end_token_ends_a_text_unless_ignored(engine, prompts, greedy, monkeypatch):
    end = greedy[2].token_ids[3]
    config = dataclasses.replace(engine.config, eos_token_ids=(end,))
    monkeypatch.setattr(engine, "model", dataclasses.replace(engine.model, config=config))
    assert engine.generate(prompts, GREEDY)[2] == greedy[2]
    result = engine.generate(prompts, dataclasses.replace(GREEDY, ignore_eos=False))[2]
    assert result.token_ids == greedy[2].token_ids[: greedy[2].token_ids.index(end) + 1]
    assert result.finish_reason == "stop"


def test_stop_strings_are_cut_off_with_what_follows(engine, prompts, greedy):
    text = greedy[3].text
    stop = text[4:6]
    options = dataclasses.replace(GREEDY, stop=("never there", stop))
    result = engine.generate(prompts[:4], options)[3]
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.token_ids == greedy[3].token_ids[: result.completion_tokens]
    assert stop in engine.tokenizer.decode(result.token_ids)
    assert stop not in engine.tokenizer.decode(result.token_ids[:-1])


def test_a_second_batch_of_one_shape_compiles_nothing(engine, prompts, greedy):
    compilations = CompilationCounter()
    engine.generate([prompt[::-1] for prompt in prompts], GREEDY)
    assert compilations.count == 0


def test_statistics_count_tokens(engine, prompts):
    before = dataclasses.replace(engine.statistics)
    engine.generate(prompts, GREEDY)
    after = engine.statistics
    assert after.prompt_tokens - before.prompt_tokens == sum(LENGTHS)
    assert after.generated_tokens - before.generated_tokens == NEW_TOKENS * len(LENGTHS)
    assert after.decode_rate > 0 and after.prefill_rate > 0


def test_no_prompts_give_no_results(engine):
    assert engine.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "options", "rule"),
    [
        ([], GREEDY, "prompt 1: the prompt must have at least one token"),
        ([320], GREEDY, "token ids must be integers in"),
        ([1] * 245, GREEDY, r"prompt tokens \(245\) plus max_new_tokens \(12\) must not exceed"),
    ],
)
def test_prompts_that_cannot_run_are_refused(engine, prompt, options, rule):
    with pytest.raises(ValueError, match=rule):
        engine.generate([[1], prompt], options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 2.0},
        {"seed": -1},
        {"stop": ("",)},
        {"stop": "text"},
        {"stop_token_ids": (-1,)},
    ],
    ids=str,
)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GenerationOptions(**wrong)


def test_generate_loads_a_model_for_one_call(model_dir, engine, greedy):
    text = "Once upon a time"
    (result,) = generate(model_dir, [text], ep_size=4, max_new_tokens=3, ignore_eos=True)
    assert result.completion_tokens == 3
    assert result.prompt_tokens == len(engine.tokenizer.encode(text))


def _request(engine, index, prompt, options, **overrides):
    return make_request(
        index,
        prompt,
        options,
        vocab_size=engine.config.vocab_size,
        max_tokens=engine.config.max_position_embeddings,
        **overrides,
    )
