"""Matrices stored as in a Hugging Face checkpoint: [out, in]."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from custom_calls.gemm import gemm


class Linear(nnx.Module):
    def __init__(self, num_in: int, num_out: int, *, bias: bool = False, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*T i"]) -> Float[Array, "*T o"]:
        y = project(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    def __init__(self, num_embeddings: int, features: int, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((num_embeddings, features), dtype))

    def __call__(self, ids: Int32[Array, " T"]) -> Float[Array, "T H"]:
        return self.weight[...][ids]


def project(x: Float[Array, "*T i"], weight: Float[Array, "o i"]) -> Float[Array, "*T o"]:
    """x @ weight.T, accumulated in float32 and rounded to the dtype of x."""
    *tokens, depth = x.shape
    return gemm(x.reshape(-1, depth), weight).reshape(*tokens, weight.shape[0])
