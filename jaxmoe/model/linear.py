"""Matrices stored as in a Hugging Face checkpoint: [out, in]."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from custom_calls.gemm import gemm, gemm_fp8
from custom_calls.layouts import QuantizedRows, QuantizedWeight, num_scale_blocks
from custom_calls.quantize import quantize_rows
from jaxmoe.plan import Quantization


class Linear(nnx.Module):
    """`weight` in `dtype`, or in FP8 with `weight_scale_inv`, a float32 for each 128 x 128 block.

    Results are in `dtype` either way, summed in float32.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        self.dtype = dtype
        self.weight, self.weight_scale_inv = make_weight(
            (num_out, num_in), dtype=dtype, quantization=quantization
        )
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def prepare(self, x: Float[Array, "T i"]) -> Float[Array, "T i"] | QuantizedRows:
        """x as the product takes it, for several projections of the same x."""
        return x if self.weight_scale_inv is None else quantize_rows(x)

    def __call__(self, x: Float[Array, "T i"] | QuantizedRows) -> Float[Array, "T o"]:
        if self.weight_scale_inv is not None:
            rows = x if isinstance(x, QuantizedRows) else quantize_rows(x)
            weight = QuantizedWeight(self.weight[...], self.weight_scale_inv[...])
            y = gemm_fp8(rows, weight, dtype=self.dtype)
        else:
            assert not isinstance(x, QuantizedRows)  # `prepare` did not make it
            y = gemm(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class Embedding(nnx.Module):
    def __init__(self, num_embeddings: int, features: int, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), dtype))

    def __call__(self, ids: Int32[Array, " T"]) -> Float[Array, "T H"]:
        return self.weight[...][ids]


def make_weight(
    shape: tuple[int, ...], *, dtype: DTypeLike, quantization: Quantization | None
) -> tuple[nnx.Param, nnx.Param | None]:
    """A matrix or a stack of them, [..., out, in], and the scales of its blocks if it has some."""
    if quantization is None:
        return nnx.Param(jnp.zeros(shape, dtype)), None
    *groups, num_out, num_in = shape
    grid = (*groups, num_scale_blocks(num_out), num_scale_blocks(num_in))
    return nnx.Param(jnp.zeros(shape, jnp.float8_e4m3fn)), nnx.Param(jnp.zeros(grid, jnp.float32))
