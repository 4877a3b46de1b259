"""How many tokens each physical expert gets, counted on the device while a step runs.

The counters belong to whoever steps: they are donated into a step and returned from it, as a cache
is. Padding is routed to no expert and never counts, so that of each layer the counts of all ranks
add up to tokens times top-k.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from jaxmoe import sharding


def empty_load(mesh: Mesh, num_layers: int, num_slots: int) -> Int32[Array, "D L P"]:
    """Zeroed counters of each rank's own tokens, for all slots of the group.

    32 bits: to be read and begun anew before 2^31 choices of an expert.
    """
    return _zeros_program(mesh, (mesh.size, num_layers, num_slots))()


@functools.cache  # so that to begin anew compiles nothing
def _zeros_program(mesh: Mesh, shape: tuple[int, ...]):
    return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=sharding.per_rank(mesh))


def add_load(
    load: Int32[Array, "L P"], physical_idx: Sequence[Int32[Array, "T K"]]
) -> Int32[Array, "L P"]:
    """One rank's counters with its choices in each layer added; -1 is none."""
    num_layers, num_slots = load.shape
    chosen = jnp.stack(physical_idx).reshape(num_layers, -1)
    layer = jnp.arange(num_layers, dtype=jnp.int32)[:, None] * num_slots
    index = jnp.where(chosen < 0, num_layers * num_slots, layer + chosen)
    return load.reshape(-1).at[index.reshape(-1)].add(1, mode="drop").reshape(load.shape)
