"""Device-varying types under `shard_map`, for the places where JAX does not infer them.

Foreign calls and loop carries need every array to vary over the same mesh axes; elsewhere JAX adds
what is missing by itself. Outside `shard_map` nothing here does anything.
"""

import jax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array


def varying_axes(*arrays: Array) -> frozenset[str]:
    """The mesh axes over which at least one of the arrays varies."""
    return frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def as_varying(array: Array, axes: frozenset[str]) -> Array:
    """The same values, typed as varying over `axes` too."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def shape_like(shape: tuple[int, ...], dtype: DTypeLike, *arrays: Array) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over every axis over which one of the arrays varies."""
    axes = varying_axes(*arrays)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    # JAX looks the axes up in the mesh of the sharding, whose spec is empty under shard_map.
    sharding = NamedSharding(jax.typeof(arrays[0]).sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=sharding, manual_axis_type=ManualAxisType(varying=axes)
    )
