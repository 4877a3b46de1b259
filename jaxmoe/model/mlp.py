"""The gated feed-forward network of dense layers and shared experts."""

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.model.linear import Linear


class MLP(nnx.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, dtype: DTypeLike):
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype=dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype=dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype)

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
