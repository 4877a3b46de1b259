"""The physical experts of one rank. Local shapes inside `shard_map`."""

from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from custom_calls.activation import silu_and_mul
from custom_calls.grouped_gemm import grouped_gemm
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from jaxmoe.config import ModelConfig


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)


class Experts(nnx.Module):
    """`gate_up_proj` [P, 2F, H] and `down_proj` [P, H, F] by physical slot, [e, ...] on a rank."""

    def __init__(self, config: ModelConfig, num_slots: int, *, dtype: DTypeLike):
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nnx.Param(jnp.zeros((num_slots, 2 * width, hidden), dtype))
        self.down_proj = nnx.Param(jnp.zeros((num_slots, hidden, width), dtype))

    def __call__(self, tokens: Tokens, *, implementation: str | None = None) -> Tokens:
        """Each group's rows through its own expert, in the layout they came in."""
        gate_up = grouped_gemm(tokens, self.gate_up_proj[...], implementation=implementation)
        return grouped_gemm(
            silu_and_mul(gate_up), self.down_proj[...], implementation=implementation
        )
