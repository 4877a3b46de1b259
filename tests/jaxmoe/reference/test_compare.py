"""The whole model against transformers, and the comparison against models that do differ."""

import argparse
import copy
import dataclasses
import importlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import sharding
from jaxmoe.checkpoint import (
    RANDOM_CONFIGS,
    CheckpointError,
    convert,
    load_model,
    write_random_checkpoint,
)
from jaxmoe.config import ModelConfig
from jaxmoe.plan import Quantization
from jaxmoe.reference import compare as comparing
from jaxmoe.reference.torch_deepseek import (
    ReferenceUnavailableError,
    import_torch,
    load_reference,
    trace_reference,
)
from jaxmoe.reference.trace import Trace
from jaxmoe.step import Steps


pytestmark = [
    pytest.mark.torch,
    # transformers and torch deprecate parts of each other and of themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PROMPT_LENGTHS = (1, 3, 16, 17, 40, 64, 90, 128, 200)  # more than ranks, pages full and not
MAX_NEW_TOKENS = 5
F32 = comparing.DEFAULT_TOLERANCE["float32"]
BF16 = comparing.DEFAULT_TOLERANCE["bfloat16"]
FP8 = comparing.DEFAULT_TOLERANCE["fp8"]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """A function from a configuration's name to its directory and the reference's traces."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    # Threads that wait for each other cost more than these small products do.
    torch.set_num_threads(1)
    made = {}

    def get(name, *, dtype=jnp.float32, fp8=False, quantization=None):
        key = (name, jnp.dtype(dtype).name, fp8, quantization)
        if key not in made:
            source_dtype = "bfloat16" if fp8 else jnp.dtype(dtype).name
            model_dir = write_random_checkpoint(
                tmp_path_factory.mktemp("reference") / name,
                RANDOM_CONFIGS[name],
                seed=11,
                dtype=source_dtype,
                fp8=fp8,
            )
            prompts = comparing.random_prompts(ModelConfig.load(model_dir), PROMPT_LENGTHS)
            model = load_reference(model_dir, dtype=dtype, quantization=quantization)
            traces = trace_reference(model, prompts, max_new_tokens=MAX_NEW_TOKENS)
            made[key] = model_dir, traces
        return made[key]

    return get


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Models that differ in their weights alone share their programs."""
    made = {}

    def get(model, **plans):
        key = (model.graphdef, model.mesh, model.slots_per_rank, *plans.values())
        steps = copy.copy(made.setdefault(key, Steps(model, **plans)))
        steps.model = model
        return steps

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(comparing, "Steps", get)
        yield


def run(reference, name, ep_size, mode, *, dtype=jnp.float32, fp8=False, num_slots=None, **options):
    model_dir, traces = reference(name, dtype=dtype, fp8=fp8)
    mesh = sharding.make_mesh(ep_size)
    model = load_model(model_dir, mesh, dtype=dtype, num_slots=num_slots)
    return comparing.compare_model(model, traces, deepep_mode=mode, **options)


@pytest.mark.parametrize(
    ("name", "ep_size", "mode", "options"),
    [
        ("v3-small", 1, "auto", {}),
        ("v3-small", 2, "normal", {"chunk_size": 33}),
        ("v3-small", 4, "low_latency", {"num_slots": 24, "max_dispatch_tokens_per_rank": 48}),
        ("v3-small", 8, "auto", {"chunk_size": 16}),
        ("v2-small", 1, "low_latency", {"chunk_size": 50}),
        ("v2-small", 8, "normal", {"max_dispatch_tokens_per_rank": 64}),
        ("tiny", 8, "auto", {}),
        ("tiny", 3, "auto", {"chunk_size": 40}),
    ],
)
def test_float32_is_the_reference(reference, name, ep_size, mode, options):
    comparison = run(reference, name, ep_size, mode, **options)
    assert comparison.passed(F32), comparison.format_table()
    assert comparison.max_logits <= F32
    assert comparison.first_token_difference is None
    assert comparison.token_agreement == 1
    assert len(comparison.decode_logits) == MAX_NEW_TOKENS - 1
    assert len(comparison.layers) == RANDOM_CONFIGS[name]["num_hidden_layers"]
    for layer in comparison.layers:
        assert layer.relative < 1e-5
        assert layer.router_agreement in (None, 1.0)


def test_fp8_checkpoint_dequantised(reference):
    comparison = run(reference, "v3-small", 4, "auto", fp8=True)
    assert comparison.passed(F32), comparison.format_table()


def test_bfloat16_is_within_its_tolerance(reference):
    comparison = run(reference, "v3-small", 2, "auto", dtype=jnp.bfloat16)
    assert comparison.passed(BF16), comparison.format_table()
    assert comparison.difference == comparison.relative_logits > 1e-3
    assert comparison.token_agreement > 0.7


@pytest.mark.parametrize("fp8", [False, True], ids=["quantised while loading", "fp8 directory"])
def test_fp8_is_within_its_tolerance(reference, fp8):
    """Weights are the same on both sides, so what differs is the rounding of activations."""
    model_dir, traces = reference("fp8-small", fp8=fp8, quantization=Quantization.FP8)
    mesh = sharding.make_mesh(4)
    model = load_model(model_dir, mesh, dtype=jnp.float32, quantization=Quantization.FP8)
    comparison = comparing.compare_model(model, traces)
    assert comparison.arithmetic == "fp8"
    assert comparison.passed(FP8), comparison.format_table()
    assert comparison.difference == comparison.relative_logits > 1e-2
    assert comparison.layers[0].relative < 0.05
    agreements = [layer.router_agreement for layer in comparison.layers[1:]]
    assert 0.8 < min(agreements) < 1
    swapped = jax.tree.map(lambda x: x, model.params)
    swap_experts(swapped)
    damaged = comparing.compare_model(dataclasses.replace(model, params=swapped), traces)
    assert not damaged.passed(FP8), damaged.format_table()


def swap_experts(params):
    experts = params["model"]["layers"][1]["mlp"]["experts"]
    for name in experts:
        if name.startswith("down_proj"):
            experts[name][...] = experts[name][...][::-1]


def drop_correction_bias(params):
    bias = params["model"]["layers"][1]["mlp"]["gate"]["e_score_correction_bias"]
    bias[...] = jnp.zeros_like(bias[...])


def drop_norm(params):
    norm = params["model"]["layers"][0]["self_attn"]["kv_a_layernorm"]["weight"]
    norm[...] = jnp.ones_like(norm[...])


@pytest.mark.parametrize("damage", [swap_experts, drop_correction_bias, drop_norm])
def test_a_different_model_does_not_pass(reference, damage):
    model_dir, traces = reference("tiny")
    model = load_model(model_dir, sharding.make_mesh(1), dtype=jnp.float32)
    damaged = jax.tree.map(lambda x: x, model.params)
    damage(damaged)
    comparison = comparing.compare_model(dataclasses.replace(model, params=damaged), traces)
    assert not comparison.passed(F32)
    assert comparison.max_logits > 0.05


def fake_trace(logits, num_prompt_tokens=2):
    logits = np.asarray(logits, np.float32)
    rows = len(logits)
    return Trace(
        num_prompt_tokens=num_prompt_tokens,
        fed=np.zeros(rows, np.int32),
        hidden=(np.ones((rows, 2), np.float32), np.ones((rows, 2), np.float32)),
        topk_idx=(np.tile(np.array([[1, 0]], np.int32), (rows, 1)),),
        logits=logits,
    )


def compare_fakes(monkeypatch, found, expected):
    model = argparse.Namespace(
        ranks=sharding.EpRanks(ep_size=1),
        slots_per_rank=2,
        dtype=jnp.float32,
        quantization=None,
        config=argparse.Namespace(first_k_dense_replace=1),
    )
    monkeypatch.setattr(comparing, "Steps", lambda *args, **kwargs: None)
    monkeypatch.setattr(comparing, "trace_model", lambda *args, **kwargs: found)
    return comparing.compare_model(model, expected)


def test_figures(monkeypatch):
    expected = [fake_trace([[0, 1], [0, 1], [1, 0]]), fake_trace([[0, 1], [0, 1], [1, 0], [1, 0]])]
    other = [[0, 1], [0, 1.5], [1, 0], [0, 0.25]]
    found = [expected[0], fake_trace(other)]
    found[1].hidden[1][2] = (1, 3)
    found[1].topk_idx[0][0] = (0, 1)  # the same set
    found[1].topk_idx[0][1] = (0, 2)
    comparison = compare_fakes(monkeypatch, found, expected)
    assert comparison.layers[0] == comparing.LayerDifference(0, 0.0, 0.0, None)
    assert comparison.layers[1].max_abs == 2
    assert comparison.layers[1].relative == pytest.approx(2 / np.sqrt(14))
    assert comparison.layers[1].router_agreement == pytest.approx(6 / 7)
    assert comparison.prefill_logits == 0.5
    assert comparison.decode_logits == (0, 1)
    assert comparison.first_token_difference == (1, 2)
    assert comparison.token_agreement == pytest.approx(4 / 5)
    assert comparison.max_logits == comparison.difference == 1
    assert not comparison.passed(10)  # float32 tokens have to be equal
    assert dataclasses.replace(comparison, dtype="bfloat16").passed(10)
    decoded = json.loads(comparison.to_json())
    assert decoded["first_token_difference"] == [1, 2]
    assert decoded["max_logits"] == 1
    table = comparison.format_table()
    assert "prompt 1, generated token 2" in table
    assert "80.00% equal" in table


def test_nan_never_passes(monkeypatch):
    expected = [fake_trace([[0, 1], [0, 1], [0, 1]])]
    found = [fake_trace([[0, 1], [np.nan, 1], [0, 1]])]
    comparison = compare_fakes(monkeypatch, found, expected)
    assert np.isnan(comparison.max_logits)
    for dtype in ("float32", "bfloat16"):
        assert not dataclasses.replace(comparison, dtype=dtype).passed(1e9)


def run_command(*arguments):
    parser = argparse.ArgumentParser()
    comparing.add_arguments(parser)
    return comparing.run(parser.parse_args(arguments))


def remember_first(function):
    results = []

    def call(*args, **kwargs):
        if not results:
            results.append(function(*args, **kwargs))
        return results[0]

    return call


def test_command_on_a_random_model(capsys, monkeypatch):
    arguments = ["--random-config", "tiny", "--ep-size", "2", "--max-new-tokens", "2"]
    # The second run only reports what the first one found.
    monkeypatch.setattr(comparing, "compare", remember_first(comparing.compare))
    assert run_command(*arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] and result["max_logits"] <= result["tolerance"] == F32
    assert run_command(*arguments, "--tolerance", "1e-12") == 1
    assert "PAST the tolerance" in capsys.readouterr().out


def test_command_refuses(reference, tmp_path):
    with pytest.raises(ValueError, match="--chunk-size"):
        run_command("--random-config", "tiny", "--chunk-size", "0")
    with pytest.raises(ValueError, match="max_new_tokens"):
        run_command("--random-config", "tiny", "--max-new-tokens", "0")
    with pytest.raises(ValueError, match="moe_intermediate_size must be a multiple of 128"):
        run_command("--random-config", "tiny", "--quantization", "fp8")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        run_command("--model-path", str(tmp_path))
    model_dir, _ = reference("tiny")
    converted = convert(model_dir, tmp_path / "converted")
    with pytest.raises(CheckpointError, match="source of a converted checkpoint"):
        run_command("--model-path", str(converted))


def test_command_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command("--random-config", "tiny", "--ep-size", "1") == 2
    assert "pip install 'jaxmoe[test]'" in capsys.readouterr().err


def test_importing_needs_no_torch():
    for module in ("compare", "torch_deepseek", "trace_jax"):
        source = importlib.import_module(f"jaxmoe.reference.{module}").__file__
        with open(source) as file:
            assert not [line for line in file if line.startswith(("import torch", "from torch "))]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one"),
        ([[1], []], "none without"),
        ([[0] * 510], "510 tokens"),
        ([[5], [256]], "prompt 1 has a token outside"),
        ([[-1]], "prompt 0 has a token outside"),
    ],
)
def test_impossible_prompts(prompts, message):
    with pytest.raises(ValueError, match=message):
        comparing.check_prompts(ModelConfig.from_hf(RANDOM_CONFIGS["tiny"]), prompts, 3)


def test_an_old_transformers_is_refused(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    with pytest.raises(ReferenceUnavailableError, match=r"transformers >= 5\.24, found 5\.17\.0"):
        import_torch()
