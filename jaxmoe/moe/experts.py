"""The physical experts of one rank. Local shapes inside `shard_map`."""

from functools import partial
from typing import TypeVar

from flax import nnx
from jax.typing import DTypeLike

from custom_calls.activation import silu_and_mul
from custom_calls.grouped_gemm import grouped_gemm
from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedWeight
from custom_calls.quantize import quantize, silu_and_mul_quantize
from jaxmoe.config import ModelConfig
from jaxmoe.model.linear import make_weight
from jaxmoe.plan import Quantization


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)


class Experts(nnx.Module):
    """`gate_up_proj` [P, 2F, H] and `down_proj` [P, H, F] by physical slot, [e, ...] on a rank.

    In FP8, each has a scale for every 128 x 128 block, `gate_up_proj_scale_inv` [P, 2F/128, H/128]
    and `down_proj_scale_inv` [P, H/128, F/128], which lie on the ranks as their weights do.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        *,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        hidden, width = config.hidden_size, config.moe_intermediate_size
        weight = partial(make_weight, dtype=dtype, quantization=quantization)
        self.gate_up_proj, self.gate_up_proj_scale_inv = weight((num_slots, 2 * width, hidden))
        self.down_proj, self.down_proj_scale_inv = weight((num_slots, hidden, width))

    def __call__(
        self,
        tokens: Tokens,
        *,
        dtype: DTypeLike,
        expected_rows: int | None = None,
        gemm_implementation: str | None = None,
        quantize_implementation: str | None = None,
    ) -> Tokens:
        """Each group's rows through its own expert, in the layout they came in; results of `dtype`.

        FP8 experts take tokens of either kind, others take no FP8. `expected_rows` is
        `grouped_gemm`'s hint.
        """
        multiply = partial(
            grouped_gemm,
            dtype=dtype,
            expected_rows=expected_rows,
            implementation=gemm_implementation,
        )
        if self.gate_up_proj_scale_inv is None or self.down_proj_scale_inv is None:
            gate_up = multiply(tokens, self.gate_up_proj[...])
            return multiply(silu_and_mul(gate_up), self.down_proj[...])
        if tokens.scale is None:
            tokens = quantize(tokens, implementation=quantize_implementation)
        gate_up = multiply(
            tokens,
            QuantizedWeight(self.gate_up_proj[...], self.gate_up_proj_scale_inv[...]),
        )
        return multiply(
            silu_and_mul_quantize(gate_up, implementation=quantize_implementation),
            QuantizedWeight(self.down_proj[...], self.down_proj_scale_inv[...]),
        )
