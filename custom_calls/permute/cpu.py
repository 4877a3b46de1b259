"""The ops of `permute` by the C++ handlers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from custom_calls import cpu_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens


def permute_contiguous(
    x: Shaped[Array, "T H"],
    group_idx: Int32[Array, "T K"],
    *,
    num_groups: int,
    max_rows: int,
    alignment: int,
) -> tuple[ContiguousTokens, Int32[Array, "T K"]]:
    rows, group_sizes, row_of = cpu_library.call(
        "jaxmoe_cpu_permute_contiguous",
        (
            jax.ShapeDtypeStruct((max_rows, x.shape[1]), x.dtype),
            jax.ShapeDtypeStruct((num_groups,), jnp.int32),
            jax.ShapeDtypeStruct(group_idx.shape, jnp.int32),
        ),
        x,
        group_idx,
        alignment=alignment,
    )
    return ContiguousTokens(rows, group_sizes, alignment), row_of


def permute_masked(
    x: Shaped[Array, "T H"], group_idx: Int32[Array, "T K"], *, num_groups: int, capacity: int
) -> tuple[MaskedTokens, Int32[Array, "T K"]]:
    rows, counts, row_of = cpu_library.call(
        "jaxmoe_cpu_permute_masked",
        (
            jax.ShapeDtypeStruct((num_groups, capacity, x.shape[1]), x.dtype),
            jax.ShapeDtypeStruct((num_groups,), jnp.int32),
            jax.ShapeDtypeStruct(group_idx.shape, jnp.int32),
        ),
        x,
        group_idx,
    )
    return MaskedTokens(rows, counts), row_of


def unpermute(
    rows: Float[Array, "M H"], row_of: Int32[Array, "T K"], weights: Float32[Array, "T K"]
) -> Float[Array, "T H"]:
    (y,) = cpu_library.call(
        "jaxmoe_cpu_unpermute",
        (jax.ShapeDtypeStruct((row_of.shape[0], rows.shape[1]), rows.dtype),),
        rows,
        row_of,
        weights,
    )
    return y
