"""What the ops of `permute` mean, in plain JAX. Their unspecified rows are zero."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from custom_calls.layouts import ContiguousTokens, MaskedTokens


def permute_contiguous(
    x: Shaped[Array, "T H"],
    group_idx: Int32[Array, "T K"],
    *,
    num_groups: int,
    max_rows: int,
    alignment: int,
) -> tuple[ContiguousTokens, Int32[Array, "T K"]]:
    is_member = _is_member(group_idx, num_groups)
    sizes = _sizes(is_member)
    starts = ContiguousTokens(None, sizes, alignment).group_starts
    row = jnp.sum(jnp.where(is_member, starts[None, :] + _position(is_member), 0), 1, jnp.int32)
    has_row = is_member.any(axis=1) & (row < max_rows)
    row_of = jnp.where(has_row, row, -1).reshape(group_idx.shape)
    return ContiguousTokens(_copy_rows(x, row_of, max_rows), sizes, alignment), row_of


def permute_masked(
    x: Shaped[Array, "T H"], group_idx: Int32[Array, "T K"], *, num_groups: int, capacity: int
) -> tuple[MaskedTokens, Int32[Array, "T K"]]:
    is_member = _is_member(group_idx, num_groups)
    position = jnp.sum(jnp.where(is_member, _position(is_member), 0), 1, jnp.int32)
    has_row = is_member.any(axis=1) & (position < capacity)
    row = group_idx * capacity + position.reshape(group_idx.shape)
    row_of = jnp.where(has_row.reshape(group_idx.shape), row, -1)
    rows = _copy_rows(x, row_of, num_groups * capacity)
    rows = rows.reshape(num_groups, capacity, x.shape[1])
    return MaskedTokens(rows, _sizes(is_member)), row_of


def unpermute(
    rows: Float[Array, "M H"], row_of: Int32[Array, "T K"], weights: Float32[Array, "T K"]
) -> Float[Array, "T H"]:
    num_rows, hidden = rows.shape
    num_tokens, top_k = row_of.shape
    y = jnp.zeros((num_tokens, hidden), jnp.float32)
    for k in range(top_k if num_rows else 0):
        row = row_of[:, k]
        has_row = (row >= 0) & (row < num_rows)
        copy = rows[jnp.where(has_row, row, 0)].astype(jnp.float32)
        y = jnp.where(has_row[:, None], y + weights[:, k, None] * copy, y)
    return y.astype(rows.dtype)


def _is_member(group_idx: Int32[Array, "T K"], num_groups: int) -> Bool[Array, "T*K e"]:
    return group_idx.reshape(-1, 1) == jnp.arange(num_groups, dtype=jnp.int32)[None, :]


def _sizes(is_member: Bool[Array, "copies e"]) -> Int32[Array, " e"]:
    return jnp.sum(is_member, axis=0, dtype=jnp.int32)


def _position(is_member: Bool[Array, "copies e"]) -> Int32[Array, "copies e"]:
    """How many copies before this one are in the group."""
    return jnp.cumsum(is_member, axis=0, dtype=jnp.int32) - is_member.astype(jnp.int32)


def _copy_rows(
    x: Shaped[Array, "T H"], row_of: Int32[Array, "T K"], num_rows: int
) -> Shaped[Array, "M H"]:
    # Negative indices count from the end; past the end they are dropped.
    target = jnp.where(row_of < 0, num_rows, row_of).reshape(-1)
    copies = jnp.repeat(x, row_of.shape[1], axis=0)
    return jnp.zeros((num_rows, x.shape[1]), x.dtype).at[target].set(copies, mode="drop")
