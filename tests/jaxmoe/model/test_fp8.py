"""FP8 linear layers, MLPs and experts against float64 products of the numbers FP8 stands for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from custom_calls.layouts import ContiguousTokens, MaskedTokens
from jaxmoe.checkpoint.fp8 import quantise
from jaxmoe.checkpoint.synthetic import RANDOM_CONFIGS
from jaxmoe.config import ModelConfig
from jaxmoe.model.linear import Linear
from jaxmoe.model.mlp import MLP
from jaxmoe.moe.experts import Experts
from jaxmoe.plan import Quantization


BLOCK = (128, 128)
TOLERANCE = {"float32": 1e-6, "bfloat16": 3e-3}
"""Of the whole result's relative difference; after a gate a rounding may go the other way."""
GATED = {"float32": 1e-3, "bfloat16": 1e-2}


def quantised_rows(x):
    """x [.., K] rounded to FP8 in blocks of 128 of a row, in float64."""
    x = np.asarray(x, np.float32)
    result = np.empty(x.shape, np.float64)
    for start in range(0, x.shape[-1], 128):
        part = x[..., start : start + 128]
        largest = np.maximum(np.abs(part).max(-1, keepdims=True), np.float32(1e-12))
        values = (part * (np.float32(448) / largest)).astype(ml_dtypes.float8_e4m3fn)
        scale = largest.astype(np.float64) / 448
        result[..., start : start + 128] = values.astype(np.float64) * scale
    return result


def weight(rng, *shape):
    """FP8 values, scales and the float64 matrix they are."""
    pairs = [
        quantise(matrix, BLOCK)
        for matrix in rng.standard_normal((int(np.prod(shape[:-2])), *shape[-2:]), np.float32)
    ]
    values, scales = (
        np.stack(x).reshape(*shape[:-2], *x[0].shape) for x in zip(*pairs, strict=True)
    )
    grid = np.repeat(np.repeat(scales.astype(np.float64), 128, -2), 128, -1)
    exact = values.astype(np.float64) * grid[..., : shape[-2], : shape[-1]]
    return values, scales, exact


def set_linear(linear, values, scales):
    linear.weight[...] = jnp.asarray(values)
    linear.weight_scale_inv[...] = jnp.asarray(scales)


def silu(x):
    return x / (1 + np.exp(-x))


def difference(found, expected):
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@nnx.jit
def call(module, x):
    return module(x)


def rounded(x, dtype):
    return np.asarray(x).astype(dtype).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_in", "num_out", "bias"), [(128, 128, False), (192, 40, True), (64, 320, False)]
)
def test_linear(num_in, num_out, bias, dtype):
    rng = np.random.default_rng(num_in)
    linear = Linear(num_in, num_out, bias=bias, dtype=dtype, quantization=Quantization.FP8)
    values, scales, exact = weight(rng, num_out, num_in)
    set_linear(linear, values, scales)
    x = jnp.asarray(rng.standard_normal((5, num_in)), dtype)
    expected = quantised_rows(x) @ exact.T
    if bias:
        linear.bias[...] = jnp.asarray(rng.standard_normal(num_out), dtype)
        expected += np.asarray(linear.bias[...], np.float64)
    y = call(linear, x)
    assert y.dtype == dtype
    assert difference(y, expected) < TOLERANCE[dtype]
    np.testing.assert_array_equal(y, call(linear, nnx.jit(Linear.prepare)(linear, x)))


def test_unquantised_linear_has_no_scales():
    linear = Linear(4, 3, dtype=jnp.float32)
    x = jnp.ones((2, 4), jnp.float32)
    assert linear.weight_scale_inv is None and linear.prepare(x) is x
    assert len(jax.tree.leaves(nnx.state(linear))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mlp(dtype):
    rng = np.random.default_rng(1)
    hidden, width = 192, 320
    mlp = MLP(hidden, width, dtype=dtype, quantization=Quantization.FP8)
    exact = {}
    for name, shape in (
        ("gate_proj", (width, hidden)),
        ("up_proj", (width, hidden)),
        ("down_proj", (hidden, width)),
    ):
        values, scales, exact[name] = weight(rng, *shape)
        set_linear(getattr(mlp, name), values, scales)
    x = jnp.asarray(rng.standard_normal((7, hidden)), dtype)
    rows = quantised_rows(x)
    gate, up = (rounded(rows @ exact[name].T, dtype) for name in ("gate_proj", "up_proj"))
    middle = rounded(rounded(silu(gate), dtype) * up, dtype)
    assert difference(mlp(x), quantised_rows(middle) @ exact["down_proj"].T) < GATED[dtype]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("contiguous", "float32"),
        ("contiguous, aligned", "bfloat16"),
        ("masked", "float32"),
        ("masked", "bfloat16"),
    ],
)
def test_experts(layout, dtype):
    rng = np.random.default_rng(2)
    config = ModelConfig.from_hf(RANDOM_CONFIGS["fp8-small"])
    hidden, width, sizes = config.hidden_size, config.moe_intermediate_size, [3, 0, 6, 1]
    experts = Experts(config, len(sizes), dtype=dtype, quantization=Quantization.FP8)
    exact = {}
    for name, shape in (("gate_up_proj", (2 * width, hidden)), ("down_proj", (hidden, width))):
        values, scales, exact[name] = weight(rng, len(sizes), *shape)
        getattr(experts, name)[...] = jnp.asarray(values)
        getattr(experts, f"{name}_scale_inv")[...] = jnp.asarray(scales)
    counts = jnp.asarray(sizes, jnp.int32)
    if layout == "masked":
        x = jnp.asarray(rng.standard_normal((len(sizes), 8, hidden)), dtype)
        tokens = MaskedTokens(x, counts)
        rows = [(g, slice(size)) for g, size in enumerate(sizes)]
    else:
        alignment = 16 if "aligned" in layout else 1
        x = jnp.asarray(rng.standard_normal((64, hidden)), dtype)
        tokens = ContiguousTokens(x, counts, alignment)
        starts = np.asarray(tokens.group_starts)
        rows = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    run = nnx.jit(Experts.__call__, static_argnames=("dtype", "expected_rows"))
    y = run(experts, tokens, dtype=tokens.x.dtype, expected_rows=3)
    assert y.x.dtype == dtype and y.scale is None
    found, expected = [], []
    for group, here in enumerate(rows):
        gate_up = rounded(
            quantised_rows(np.asarray(x)[here]) @ exact["gate_up_proj"][group].T, dtype
        )
        gate, up = np.split(gate_up, 2, axis=-1)
        middle = quantised_rows(rounded(silu(gate) * up, dtype))
        expected.append(middle @ exact["down_proj"][group].T)
        found.append(np.asarray(y.x)[here].astype(np.float64))
    assert difference(np.concatenate(found), np.concatenate(expected)) < GATED[dtype]
