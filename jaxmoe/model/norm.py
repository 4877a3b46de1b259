"""Root-mean-square normalisation (arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    def __init__(self, features: int, *, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T H"]) -> Float[Array, "*T H"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        # Expanded by hand: rank promotion is an error in the tests.
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return weight * x32.astype(x.dtype)
