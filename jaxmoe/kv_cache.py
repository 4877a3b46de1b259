"""The paged latent cache of multi-head latent attention: one pool of pages per rank.

A token's entry is its compressed key-value and its rotated key, `kv_lora_rank + qk_rope_head_dim`
numbers; the rotated key keeps DeepSeek's interleaved pairs. A cache is donated into each step and
returned from it. Page 0 is where padding writes and is never handed to a request.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxmoe import sharding
from jaxmoe.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """`latent[l]` is layer l's pool. One array a layer, so that XLA updates each in place and a
    layer can be sent away while the next one is computed."""

    latent: tuple[Float[Array, "*D pages page_size latent"], ...]

    @property
    def page_size(self) -> int:
        return self.latent[0].shape[-2]

    @property
    def num_pages(self) -> int:
        return self.latent[0].shape[-3]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.latent)


def allocate(
    config: ModelConfig, mesh: Mesh, *, num_pages: int, page_size: int, dtype: DTypeLike
) -> KVCache:
    """A zeroed cache of `num_pages` pages on each rank, page 0 included."""
    shape = (mesh.size, num_pages, page_size, config.latent_dim)
    zeros = _zeros_program(mesh, config.num_hidden_layers, shape, jnp.dtype(dtype))
    return KVCache(latent=zeros())


@functools.cache  # so that a second cache of the same sizes compiles nothing
def _zeros_program(mesh: Mesh, num_layers: int, shape: tuple[int, ...], dtype: jnp.dtype):
    return jax.jit(
        lambda: tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        out_shardings=sharding.per_rank(mesh),
    )


def read_pages(
    cache: KVCache, page_ids: Int32[Array, " n"]
) -> Float[Array, "n L page_size latent"]:
    """Copies of these pages of one rank, a page's layers together."""
    return jnp.stack([layer[page_ids] for layer in cache.latent], axis=1)


def write_pages(
    cache: KVCache,
    page_ids: Int32[Array, " n"],
    pages: Float[Array, "n L page_size latent"],
) -> KVCache:
    """The cache of one rank with these pages replaced; what is to go nowhere goes to page 0."""
    layers = (layer.at[page_ids].set(pages[:, index]) for index, layer in enumerate(cache.latent))
    return KVCache(latent=tuple(layers))


def write(
    layer: Float[Array, "pages page_size latent"],
    entries: Float[Array, "T latent"],
    slots: Int32[Array, " T"],
) -> Float[Array, "pages page_size latent"]:
    """One layer's pool (of one rank) with `entries` written to `slots`."""
    pages, page_size, latent = layer.shape
    if slots.shape[0] == 1:
        # XLA makes a write of one row into an update that copies the whole pool; the same row
        # twice stays a scatter, which is done in place.
        entries, slots = jnp.repeat(entries, 2, axis=0), jnp.repeat(slots, 2)
    flat = layer.reshape(pages * page_size, latent)
    return flat.at[slots].set(entries.astype(layer.dtype)).reshape(layer.shape)
