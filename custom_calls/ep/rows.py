"""Tokens as rows of one array, whatever they consist of: what moves is a row. Local shapes.

FP8 values and their scales travel side by side in a row of bytes.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from custom_calls.layouts import (
    ContiguousTokens,
    MaskedTokens,
    QuantizedRows,
    num_scale_blocks,
    num_scale_rows,
)


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)


def pack(x: Array | QuantizedRows) -> Shaped[Array, "T R"]:
    """One row for each token; what `unpack` undoes."""
    if not isinstance(x, QuantizedRows):
        return x
    num_tokens, _ = x.values.shape
    scale = x.scale[:, :num_tokens].T  # [T, H / 128]
    scale_bytes = jax.lax.bitcast_convert_type(scale, jnp.uint8).reshape(num_tokens, -1)
    return jnp.concatenate([jax.lax.bitcast_convert_type(x.values, jnp.uint8), scale_bytes], -1)


def unpack(tokens: Tokens, hidden: int) -> Tokens:
    """Tokens of H = `hidden` whose rows were packed."""
    rows = tokens.x
    if rows.dtype != jnp.uint8:
        return tokens
    values = jax.lax.bitcast_convert_type(rows[..., :hidden], jnp.float8_e4m3fn)
    by_block = (*rows.shape[:-1], num_scale_blocks(hidden), 4)
    scale = jax.lax.bitcast_convert_type(rows[..., hidden:].reshape(by_block), jnp.float32)
    num_rows = rows.shape[-2]
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, num_scale_rows(num_rows) - num_rows)]
    scale = jnp.pad(jnp.swapaxes(scale, -1, -2), padding)
    if isinstance(tokens, ContiguousTokens):
        return ContiguousTokens(values, tokens.group_sizes, tokens.alignment, scale)
    return MaskedTokens(values, tokens.counts, scale)
