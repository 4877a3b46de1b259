"""What the ops of `quantize` mean, in plain JAX: of every row, also of those that no group owns."""

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from custom_calls.layouts import (
    SCALE_BLOCK,
    ContiguousTokens,
    MaskedTokens,
    QuantizedRows,
    QuantizedWeight,
    num_scale_blocks,
    num_scale_rows,
)


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

FP8 = jnp.float8_e4m3fn
FP8_MAX = float(jnp.finfo(FP8).max)
MIN_BLOCK_MAX = 1e-12  # a block of zeros has a scale too


def quantize_rows(x: Float[Array, "M K"]) -> QuantizedRows:
    values, scale = _quantize(x)
    return QuantizedRows(values, scale)


def quantize(tokens: Tokens) -> Tokens:
    values, scale = _quantize(tokens.x)
    return dataclasses.replace(tokens, x=values, scale=scale)


def silu_and_mul_quantize(tokens: Tokens) -> Tokens:
    gate, up = jnp.split(tokens.x.astype(jnp.float32), 2, axis=-1)
    values, scale = _quantize((jax.nn.silu(gate) * up).astype(tokens.x.dtype))
    return dataclasses.replace(tokens, x=values, scale=scale)


def dequantize_rows(rows: QuantizedRows) -> Float32[Array, "M K"]:
    return _dequantize(rows.values, rows.scale)


def dequantize_tokens(tokens: Tokens) -> Tokens:
    return dataclasses.replace(tokens, x=_dequantize(tokens.x, tokens.scale), scale=None)


def dequantize_weight(weight: QuantizedWeight) -> Float32[Array, "... N K"]:
    num_out, depth = weight.values.shape[-2:]
    scale = jnp.repeat(weight.scale, SCALE_BLOCK, axis=-1)[..., :depth]
    scale = jnp.repeat(scale, SCALE_BLOCK, axis=-2)[..., :num_out, :]
    return weight.values.astype(jnp.float32) * scale


def _quantize(x: Float[Array, "... M K"]) -> tuple[Array, Array]:
    *groups, num_rows, depth = x.shape
    blocks = num_scale_blocks(depth)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, blocks * SCALE_BLOCK - depth)]
    blocked = jnp.pad(x.astype(jnp.float32), padding).reshape(
        *groups, num_rows, blocks, SCALE_BLOCK
    )
    largest = jnp.maximum(jnp.max(jnp.abs(blocked), axis=-1), MIN_BLOCK_MAX)  # [.., M, blocks]
    values = (blocked * (FP8_MAX / largest)[..., None]).astype(FP8)
    scale = jnp.swapaxes(largest * (1 / FP8_MAX), -1, -2)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_scale_rows(num_rows) - num_rows)]
    return values.reshape(*groups, num_rows, blocks * SCALE_BLOCK)[..., :depth], jnp.pad(
        scale, padding
    )


def _dequantize(values: Array, scale: Float32[Array, "... blocks rows"]) -> Array:
    num_rows, depth = values.shape[-2:]
    factor = jnp.swapaxes(scale, -1, -2)[..., :num_rows, :]  # [.., M, blocks]
    return values.astype(jnp.float32) * jnp.repeat(factor, SCALE_BLOCK, axis=-1)[..., :depth]
