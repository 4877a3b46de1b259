"""`silu_and_mul`: the gate of a gated feed-forward network, on grouped tokens. Shapes are local."""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp

from custom_calls import cpu_library
from custom_calls.activation import cpu, reference
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.select import Implementation, select


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

_CONTIGUOUS = {
    "cpu": Implementation(cpu.contiguous, "cpu", cpu_library.missing),
    "reference": Implementation(reference.silu_and_mul),
}
_MASKED = {
    "cpu": Implementation(cpu.masked, "cpu", cpu_library.missing),
    "reference": Implementation(reference.silu_and_mul),
}


def silu_and_mul(tokens: Tokens, *, implementation: str | None = None) -> Tokens:
    """`y[.., f] = silu(x[.., f]) * x[.., F + f]` for x [.., 2F], gate before up as in Hugging Face.

    Computed in float32 and rounded once; the result has the dtype of x, float32 or bfloat16. Sizes
    and counts pass through, and rows of no group are unspecified in the result too; "cpu" does not
    touch them. Raises ValueError when shapes or dtypes do not fit; a negative size or count is an
    error of the "cpu" call.
    """
    is_contiguous = isinstance(tokens, ContiguousTokens)
    rank, sizes = (2, tokens.group_sizes) if is_contiguous else (3, tokens.counts)
    x = tokens.x
    if x.ndim != rank or x.shape[-1] % 2:
        dims = "[M, 2F]" if is_contiguous else "[e, C, 2F]"
        raise ValueError(f"x {dims} must hold gate and up side by side, got {x.shape}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    if sizes.ndim != 1 or sizes.dtype != jnp.int32 or (rank == 3 and sizes.shape != x.shape[:1]):
        raise ValueError(
            f"there must be one int32 for each group, got {sizes.dtype}{list(sizes.shape)}"
        )
    table = _CONTIGUOUS if is_contiguous else _MASKED
    name = f"silu_and_mul({type(tokens).__name__})"
    return dataclasses.replace(tokens, x=select(name, table, implementation)(tokens))
