"""How a model is run: what a flag means for a checkpoint, and what is refused."""

import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS
from jaxmoe.checkpoint.fp8 import QUANTIZATION_CONFIG
from jaxmoe.config import ModelConfig
from jaxmoe.plan import (
    DispatchMode,
    ExecutionPlan,
    Quantization,
    check_quantization,
    resolve_quantization,
)


def config_of(name="fp8-small", **changes):
    return ModelConfig.from_hf(RANDOM_CONFIGS[name] | changes)


@pytest.mark.parametrize(
    ("name", "plain", "native"),
    [
        (None, None, Quantization.FP8),
        ("none", None, None),
        ("fp8", Quantization.FP8, Quantization.FP8),
    ],
)
def test_quantization_is_the_checkpoints_unless_asked_for(name, plain, native):
    assert resolve_quantization(name, config_of()) is plain
    fp8 = config_of(quantization_config=QUANTIZATION_CONFIG)
    assert resolve_quantization(name, fp8) is native


def test_what_cannot_run_in_fp8_is_refused():
    with pytest.raises(ValueError, match=r"quantization must be one of .* got 'int8'"):
        resolve_quantization("int8", config_of())
    with pytest.raises(ValueError, match=r"moe_intermediate_size must be a multiple of 128 .* 96"):
        check_quantization(Quantization.FP8, config_of("v3-small"))
    other = QUANTIZATION_CONFIG | {"weight_block_size": [64, 128]}
    odd = config_of(quantization_config=other)
    with pytest.raises(ValueError, match=r"weight_block_size .* got \[64, 128\]: --quantization n"):
        check_quantization(Quantization.FP8, odd)
    check_quantization(None, odd)
    check_quantization(Quantization.FP8, config_of())


def test_expected_rows_are_rounded_up():
    plan = ExecutionPlan(ep_size=4, slots_per_rank=6, dispatch_mode=DispatchMode.NORMAL)
    assert plan.expected_rows(16, 3) == 8
    assert plan.expected_rows(17, 3) == 9
    assert plan.expected_rows(0, 3) == 0


def test_row_alignment_is_positive():
    with pytest.raises(ValueError, match="row_alignment must be positive, got 0"):
        ExecutionPlan(1, 1, DispatchMode.NORMAL, row_alignment=0)
