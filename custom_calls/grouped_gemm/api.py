"""`grouped_gemm`: each group of tokens times the weights of its group. Shapes are local."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.deep_gemm import library
from custom_calls.grouped_gemm import cpu, deep_gemm, pallas, ragged_dot, reference
from custom_calls.layouts import (
    ContiguousTokens,
    MaskedTokens,
    QuantizedWeight,
    num_scale_blocks,
    num_scale_rows,
)
from custom_calls.select import Implementation, select


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

FP8 = jnp.float8_e4m3fn

_TABLES = {
    ("ContiguousTokens", "bf16"): {
        "deep_gemm": Implementation(deep_gemm.contiguous, "gpu", library.missing),
        "cpu": Implementation(cpu.contiguous, "cpu", cpu_library.missing),
        "reference": Implementation(reference.contiguous),
        "ragged_dot": Implementation(ragged_dot.contiguous),
        "pallas": Implementation(pallas.contiguous, "gpu", pallas.missing),
    },
    ("MaskedTokens", "bf16"): {
        "deep_gemm": Implementation(deep_gemm.masked, "gpu", library.missing),
        "cpu": Implementation(cpu.masked, "cpu", cpu_library.missing),
        "reference": Implementation(reference.masked),
        "ragged_dot": Implementation(ragged_dot.masked),
        "pallas": Implementation(pallas.masked, "gpu", pallas.missing),
    },
    ("ContiguousTokens", "f32"): {
        "cpu": Implementation(cpu.contiguous, "cpu", cpu_library.missing),
        "reference": Implementation(reference.contiguous),
        "ragged_dot": Implementation(ragged_dot.contiguous),
    },
    ("MaskedTokens", "f32"): {
        "cpu": Implementation(cpu.masked, "cpu", cpu_library.missing),
        "reference": Implementation(reference.masked),
        "ragged_dot": Implementation(ragged_dot.masked),
    },
    ("ContiguousTokens", "fp8"): {
        "deep_gemm": Implementation(deep_gemm.contiguous, "gpu", library.missing),
        "cpu": Implementation(cpu.contiguous_fp8, "cpu", cpu_library.missing),
        "reference": Implementation(reference.contiguous_fp8),
    },
    ("MaskedTokens", "fp8"): {
        "deep_gemm": Implementation(deep_gemm.masked, "gpu", library.missing),
        "cpu": Implementation(cpu.masked_fp8, "cpu", cpu_library.missing),
        "reference": Implementation(reference.masked_fp8),
    },
    ("ContiguousTokens", "fp8 to f32"): {
        "cpu": Implementation(cpu.contiguous_fp8, "cpu", cpu_library.missing),
        "reference": Implementation(reference.contiguous_fp8),
    },
    ("MaskedTokens", "fp8 to f32"): {
        "cpu": Implementation(cpu.masked_fp8, "cpu", cpu_library.missing),
        "reference": Implementation(reference.masked_fp8),
    },
}


def row_alignment() -> int:
    """The multiple at which groups of rows should start and slabs end, for the best implementation.

    128 where "deep_gemm" can run, whose tiles must not straddle groups; 1 elsewhere.
    """
    function = select("grouped_gemm", _TABLES["ContiguousTokens", "bf16"], None)
    return deep_gemm.ROW_ALIGNMENT if function is deep_gemm.contiguous else 1


def grouped_gemm(
    tokens: Tokens,
    weights: Float[Array, "e N K"] | QuantizedWeight,
    *,
    dtype: DTypeLike | None = None,
    expected_rows: int | None = None,
    implementation: str | None = None,
) -> Tokens:
    """Multiplies the rows of group g by `weights[g]`, which is stored (out, in) as in Hugging Face.

    `y[m, n] = sum_k x[m, k] * weights[g, n, k]`, summed in float32. The kernel follows from the
    layout of the tokens: `ContiguousTokens` with x [M, K] gives one with x [M, N], `MaskedTokens`
    with x [e, C, K] gives one with x [e, C, N]; sizes and counts pass through. Rows of no group
    are unspecified in the result too. With "cpu" a row's result depends, bit for bit, on nothing
    but that row and its group's weights.

    x and weights share one dtype, float32 or bfloat16, which is also that of the result. Or both
    are FP8 with scales (see `layouts`), and the result has `dtype`, bfloat16 by default.

    `expected_rows` is how many rows a group has on average, a hint from which "deep_gemm" chooses
    its tile; unless given it is taken from the room there is.

    Raises ValueError when dtypes or shapes do not fit, or are not for the chosen implementation
    ("deep_gemm": groups aligned to 64 or 128 rows, a capacity C that is a multiple of 64). A
    negative size or count is an error of the "cpu" call, and an empty group in the others.
    """
    is_contiguous = isinstance(tokens, ContiguousTokens)
    if is_contiguous:
        _check(tokens.x, "[M, K]", 2, tokens.group_sizes, "group_sizes", weights)
        if tokens.alignment < 1:
            raise ValueError(f"alignment must be positive, got {tokens.alignment}")
    else:
        _check(tokens.x, "[e, C, K]", 3, tokens.counts, "counts", weights)
        if tokens.x.shape[0] != tokens.counts.shape[0]:
            raise ValueError(
                f"x [e, C, K] {tokens.x.shape} and counts {tokens.counts.shape} must have one "
                "number of groups e"
            )
    layout = type(tokens).__name__
    if isinstance(weights, QuantizedWeight):
        _check_scales(tokens, weights)
        dtype = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
        if dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
        kind = "fp8" if dtype == jnp.bfloat16 else "fp8 to f32"
    else:
        if dtype not in (None, tokens.x.dtype):
            raise ValueError(f"dtype must be that of x ({tokens.x.dtype}), got {dtype}")
        dtype = tokens.x.dtype
        kind = "bf16" if dtype == jnp.bfloat16 else "f32"
    function = select(f"grouped_gemm({layout}, {kind})", _TABLES[layout, kind], implementation)
    y = function(tokens, weights, dtype=dtype, expected_rows=expected_rows)
    return dataclasses.replace(tokens, x=y, scale=None)


def _check(
    x: Array, dims: str, rank: int, sizes: Array, name: str, weights: Array | QuantizedWeight
) -> None:
    values = weights.values if isinstance(weights, QuantizedWeight) else weights
    if x.ndim != rank or values.ndim != 3 or x.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"x {dims} {x.shape} and weights [e, N, K] {values.shape} must have one depth K"
        )
    if sizes.shape != values.shape[:1] or sizes.dtype != jnp.int32:
        raise ValueError(
            f"{name} must be int32[{values.shape[0]}], one number for each group of weights, got "
            f"{sizes.dtype}{list(sizes.shape)}"
        )
    allowed = (FP8,) if isinstance(weights, QuantizedWeight) else (jnp.float32, jnp.bfloat16)
    if x.dtype != values.dtype or x.dtype not in allowed:
        raise ValueError(
            "x and weights must both be float32, both bfloat16 or both float8_e4m3fn with scales, "
            f"got {x.dtype} and {values.dtype}"
        )


def _check_scales(tokens: Tokens, weights: QuantizedWeight) -> None:
    *groups, num_rows, depth = tokens.x.shape
    num_groups, num_out, _ = weights.values.shape
    blocks = num_scale_blocks(depth)
    for name, scale, shape in (
        ("tokens.scale", tokens.scale, (*groups, blocks, num_scale_rows(num_rows))),
        ("weights.scale", weights.scale, (num_groups, num_scale_blocks(num_out), blocks)),
    ):
        if scale is None or scale.shape != shape or scale.dtype != jnp.float32:
            found = "none" if scale is None else f"{scale.dtype}{list(scale.shape)}"
            raise ValueError(f"{name} must be float32{list(shape)}, got {found}")
