"""What `grouped_gemm` means, in plain JAX and float32. Its unspecified rows are zero."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.varying import as_varying, varying_axes


def contiguous(tokens: ContiguousTokens, weights: Float[Array, "e N K"]) -> Float[Array, "M N"]:
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
    return y.astype(tokens.x.dtype)


def masked(tokens: MaskedTokens, weights: Float[Array, "e N K"]) -> Float[Array, "e C N"]:
    position = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)
    is_owned = position[None, :] < tokens.counts[:, None]  # [e, C]
    y = jax.vmap(_matmul)(tokens.x, weights)
    return jnp.where(is_owned[:, :, None], y, 0.0).astype(tokens.x.dtype)


def _matmul(x: Float[Array, "M K"], weight: Float[Array, "N K"]) -> Float[Array, "M N"]:
    return jnp.matmul(
        x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
