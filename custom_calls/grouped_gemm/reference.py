"""What `grouped_gemm` means, in plain JAX and float32. Its unspecified rows are zero."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedWeight
from custom_calls.quantize.reference import dequantize_tokens, dequantize_weight
from custom_calls.varying import as_varying, varying_axes


def contiguous(
    tokens: ContiguousTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "M N"]:
    num_rows = tokens.x.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    starts = tokens.group_starts

    def add_group(y, group):
        start, size, weight = group
        is_owned = (row >= start) & (row < start + size)
        return jnp.where(is_owned[:, None], _matmul(tokens.x, weight), y), None

    groups = (starts, tokens.group_sizes, weights)
    y = jnp.zeros((num_rows, weights.shape[1]), jnp.float32)
    y = as_varying(y, varying_axes(tokens.x, *groups))
    y, _ = jax.lax.scan(add_group, y, groups)
    return y.astype(dtype)


def masked(
    tokens: MaskedTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "e C N"]:
    position = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)
    is_owned = position[None, :] < tokens.counts[:, None]  # [e, C]
    y = jax.vmap(_matmul)(tokens.x, weights)
    return jnp.where(is_owned[:, :, None], y, 0.0).astype(dtype)


def contiguous_fp8(
    tokens: ContiguousTokens,
    weights: QuantizedWeight,
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "M N"]:
    return contiguous(
        dequantize_tokens(tokens),
        dequantize_weight(weights),
        dtype=dtype,
        expected_rows=expected_rows,
    )


def masked_fp8(
    tokens: MaskedTokens, weights: QuantizedWeight, *, dtype: jnp.dtype, expected_rows: int | None
) -> Float[Array, "e C N"]:
    return masked(
        dequantize_tokens(tokens),
        dequantize_weight(weights),
        dtype=dtype,
        expected_rows=expected_rows,
    )


def _matmul(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return jnp.matmul(
        x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
