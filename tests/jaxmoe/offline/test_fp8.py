"""The embedded model in FP8: the same tokens from any directory, on any number of ranks."""

import jax
import numpy as np
import pytest

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.checkpoint.quantize import quantize
from jaxmoe.offline import GenerationOptions, OfflineEngine
from jaxmoe.plan import DispatchMode, ExecutionPlan, Quantization
from jaxmoe.reference.trace_jax import trace_model
from jaxmoe.step import Steps
from jaxmoe.tasks import evaluation_set


pytestmark = pytest.mark.slow

OPTIONS = GenerationOptions(max_new_tokens=32)
QUESTIONS = [item.question for item in evaluation_set("new_seeds")[:12]]


def answers(model_path, **options):
    engine = OfflineEngine.load(model_path, batch_size=16, **options)
    prompts = [
        engine.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question in QUESTIONS
    ]
    return engine.model, engine.generate(prompts, OPTIONS)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return quantize(EMBEDDED_MODEL, tmp_path_factory.mktemp("fp8") / "model")


@pytest.fixture(scope="module")
def expected():
    model, generations = answers(EMBEDDED_MODEL, ep_size=1, quantization="fp8")
    assert model.quantization is Quantization.FP8
    return generations


@pytest.mark.parametrize(
    "options",
    [
        {"ep_size": 8, "deepep_mode": "low_latency"},
        {"ep_size": 2, "deepep_mode": "normal", "num_redundant_experts": 4},
    ],
    ids=str,
)
def test_a_quantised_directory_runs_in_fp8(quantised, expected, options):
    model, generations = answers(quantised, **options)
    assert model.quantization is Quantization.FP8
    assert generations == expected


def test_dequantised_it_is_a_model_nearby(quantised):
    """The weights are the same numbers; only activations are no longer rounded to FP8."""
    prompt = np.arange(1, 33)

    def logits(quantization):
        engine = OfflineEngine.load(quantised, ep_size=1, quantization=quantization)
        plan = ExecutionPlan(1, engine.model.slots_per_rank, DispatchMode.NORMAL)
        steps = Steps(engine.model, prefill=plan, decode=plan)
        kinds = {leaf.dtype.name for leaf in jax.tree.leaves(engine.model.params)}
        return kinds, trace_model(engine.model, steps, [prompt], [len(prompt)])[0].logits

    kinds, expected = logits("fp8")
    assert "float8_e4m3fn" in kinds
    kinds, actual = logits("none")
    assert "float8_e4m3fn" not in kinds
    difference = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 1e-4 < difference < 0.1
