"""Sorting tokens by group into either layout, and summing the rows of each token. Shapes are local.

A token t goes to up to K groups, `group_idx[t, k]`; each of these is a copy (t, k) of it. `row_of`
says in which row the copy lies, and is all that the way back needs. Within a group copies keep
the order of (t, k).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from custom_calls import cpu_library, triton_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.permute import cpu, reference
from custom_calls.select import Implementation, select


_CONTIGUOUS = {
    "triton": triton_library.implementation("custom_calls.permute.triton", "permute_contiguous"),
    "cpu": Implementation(cpu.permute_contiguous, "cpu", cpu_library.missing),
    "reference": Implementation(reference.permute_contiguous),
}
_MASKED = {
    "triton": triton_library.implementation("custom_calls.permute.triton", "permute_masked"),
    "cpu": Implementation(cpu.permute_masked, "cpu", cpu_library.missing),
    "reference": Implementation(reference.permute_masked),
}
_UNPERMUTE = {
    "triton": triton_library.implementation("custom_calls.permute.triton", "unpermute"),
    "cpu": Implementation(cpu.unpermute, "cpu", cpu_library.missing),
    "reference": Implementation(reference.unpermute),
}


def permute_contiguous(
    x: Shaped[Array, "T H"],
    group_idx: Int32[Array, "T K"],
    *,
    num_groups: int,
    max_rows: int,
    alignment: int = 1,
    implementation: str | None = None,
) -> tuple[ContiguousTokens, Int32[Array, "T K"]]:
    """Copies tokens to rows sorted by group, each group starting at a multiple of `alignment`.

    Returns tokens with x [max_rows, H] and `row_of` [T, K]. A copy whose group is outside
    [0, num_groups), -1 by convention, goes nowhere and has row -1.

    `max_rows` is the caller's bound: T * K, plus `alignment - 1` for each group, always suffices.
    Copies past it have row -1 as well, but `group_sizes` still counts them: rows were lost when
    the last group's start plus its size exceeds `max_rows`, or when a row is -1 whose group is
    valid.

    x may have any dtype of whole bytes. Raises ValueError when shapes or dtypes do not fit or a
    bound is out of range.
    """
    _check_permute(x, group_idx, num_groups, "max_rows", max_rows, max_rows)
    if alignment < 1:
        raise ValueError(f"alignment must be positive, got {alignment}")
    function = select("permute_contiguous", _CONTIGUOUS, implementation)
    return function(x, group_idx, num_groups=num_groups, max_rows=max_rows, alignment=alignment)


def permute_masked(
    x: Shaped[Array, "T H"],
    group_idx: Int32[Array, "T K"],
    *,
    num_groups: int,
    capacity: int,
    implementation: str | None = None,
) -> tuple[MaskedTokens, Int32[Array, "T K"]]:
    """Copies tokens to a block of `capacity` rows for each group.

    Returns tokens with x [num_groups, capacity, H] and `row_of` [T, K], where row is
    group * capacity + position: a row of x reshaped to [num_groups * capacity, H]. A copy whose
    group is outside [0, num_groups), -1 by convention, goes nowhere and has row -1.

    A group's copies past its capacity have row -1 as well, but `counts` still counts them: rows
    were lost when a count exceeds `capacity`. dtypes and errors are as in `permute_contiguous`.
    """
    _check_permute(x, group_idx, num_groups, "capacity", capacity, num_groups * capacity)
    function = select("permute_masked", _MASKED, implementation)
    return function(x, group_idx, num_groups=num_groups, capacity=capacity)


def unpermute(
    rows: Float[Array, "M H"],
    row_of: Int32[Array, "T K"],
    weights: Float32[Array, "T K"] | None,
    *,
    implementation: str | None = None,
) -> Float[Array, "T H"]:
    """Sums each token's rows: `y[t] = sum_k weights[t, k] * rows[row_of[t, k]]`.

    The sum runs in float32 and in the order of k; the result has the dtype of `rows`, float32 or
    bfloat16. Copies whose row is outside [0, M), -1 by convention, are skipped whatever their
    weight, and rows that nothing points to are never read. Without weights they are all one.
    Raises ValueError when shapes or dtypes do not fit.
    """
    if rows.ndim != 2 or rows.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"rows must be [M, H], float32 or bfloat16, got {rows.dtype}{list(rows.shape)}"
        )
    if row_of.ndim != 2 or row_of.dtype != jnp.int32:
        raise ValueError(f"row_of must be int32 [T, K], got {row_of.dtype}{list(row_of.shape)}")
    if weights is None:
        weights = jnp.ones(row_of.shape, jnp.float32)
    if weights.shape != row_of.shape or weights.dtype != jnp.float32:
        raise ValueError(
            f"weights must be float32{list(row_of.shape)} like row_of, got "
            f"{weights.dtype}{list(weights.shape)}"
        )
    return select("unpermute", _UNPERMUTE, implementation)(rows, row_of, weights)


def _check_permute(
    x: Array, group_idx: Array, num_groups: int, bound_name: str, bound: int, num_rows: int
) -> None:
    if x.ndim != 2 or group_idx.ndim != 2 or x.shape[0] != group_idx.shape[0]:
        raise ValueError(
            f"x [T, H] {x.shape} and group_idx [T, K] {group_idx.shape} must have one number of "
            "tokens T"
        )
    if group_idx.dtype != jnp.int32:
        raise ValueError(f"group_idx must be int32, got {group_idx.dtype}")
    if num_groups < 0 or bound < 0:
        raise ValueError(
            f"num_groups ({num_groups}) and {bound_name} ({bound}) must not be negative"
        )
    if max(num_rows, group_idx.size) > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{max(num_rows, group_idx.size)} rows do not fit int32 row numbers")
