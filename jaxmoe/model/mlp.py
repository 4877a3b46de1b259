"""The gated feed-forward network of dense layers and shared experts."""

from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmoe.model.linear import Linear
from jaxmoe.plan import Quantization


class MLP(nnx.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        linear = partial(Linear, dtype=dtype, quantization=quantization)
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
        rows = self.gate_proj.prepare(x)
        return self.down_proj(jax.nn.silu(self.gate_proj(rows)) * self.up_proj(rows))
