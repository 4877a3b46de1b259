"""`grouped_gemm`: each group of tokens times the weights of its group. Shapes are local."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.grouped_gemm import cpu, reference
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.select import Implementation, select


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

_CONTIGUOUS = {
    "cpu": Implementation(cpu.contiguous, "cpu", cpu_library.missing),
    "reference": Implementation(reference.contiguous),
}
_MASKED = {
    "cpu": Implementation(cpu.masked, "cpu", cpu_library.missing),
    "reference": Implementation(reference.masked),
}


def grouped_gemm(
    tokens: Tokens, weights: Float[Array, "e N K"], *, implementation: str | None = None
) -> Tokens:
    """Multiplies the rows of group g by `weights[g]`, which is stored (out, in) as in Hugging Face.

    `y[m, n] = sum_k x[m, k] * weights[g, n, k]`, summed in float32. The kernel follows from the
    layout of the tokens: `ContiguousTokens` with x [M, K] gives one with x [M, N], `MaskedTokens`
    with x [e, C, K] gives one with x [e, C, N]; sizes and counts pass through. Rows of no group
    are unspecified in the result too. With "cpu" a row's result depends, bit for bit, on nothing
    but that row and its group's weights.

    x and weights share one dtype, float32 or bfloat16, which is also that of the result. Raises
    ValueError when dtypes or shapes do not fit; a negative size or count is an error of the "cpu"
    call, and an empty group in the reference.
    """
    if isinstance(tokens, ContiguousTokens):
        _check(tokens.x, "[M, K]", 2, tokens.group_sizes, "group_sizes", weights)
        if tokens.alignment < 1:
            raise ValueError(f"alignment must be positive, got {tokens.alignment}")
        function = select("grouped_gemm(ContiguousTokens)", _CONTIGUOUS, implementation)
    else:
        _check(tokens.x, "[e, C, K]", 3, tokens.counts, "counts", weights)
        if tokens.x.shape[0] != weights.shape[0]:
            raise ValueError(
                f"x [e, C, K] {tokens.x.shape} and weights [e, N, K] {weights.shape} must have one "
                "number of groups e"
            )
        function = select("grouped_gemm(MaskedTokens)", _MASKED, implementation)
    return dataclasses.replace(tokens, x=function(tokens, weights))


def _check(x: Array, dims: str, rank: int, sizes: Array, name: str, weights: Array) -> None:
    if x.ndim != rank or weights.ndim != 3 or x.shape[-1] != weights.shape[-1]:
        raise ValueError(
            f"x {dims} {x.shape} and weights [e, N, K] {weights.shape} must have one depth K"
        )
    if sizes.shape != weights.shape[:1] or sizes.dtype != jnp.int32:
        raise ValueError(
            f"{name} must be int32[{weights.shape[0]}], one number for each group of weights, got "
            f"{sizes.dtype}{list(sizes.shape)}"
        )
    if x.dtype != weights.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            "x and weights must both be float32 or both bfloat16, got "
            f"{x.dtype} and {weights.dtype}"
        )
