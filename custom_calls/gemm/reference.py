"""What the ops of `gemm` mean, in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.layouts import QuantizedRows, QuantizedWeight
from custom_calls.quantize.reference import dequantize_rows, dequantize_weight


def gemm(
    x: Float[Array, "M K"], weight: Float[Array, "N K"], *, dtype: jnp.dtype
) -> Float[Array, "M N"]:
    contract = (((1,), (1,)), ((), ()))
    y = jax.lax.dot_general(
        x,
        weight,
        contract,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return y.astype(dtype)


def gemm_fp8(x: QuantizedRows, weight: QuantizedWeight, *, dtype: jnp.dtype) -> Float[Array, "M N"]:
    y = gemm(dequantize_rows(x), dequantize_weight(weight), dtype=jnp.dtype(jnp.float32))
    return y.astype(dtype)


def gemm_by_head(
    x: Float[Array, "T N K"],
    weight: Float[Array, "N R C"],
    *,
    start: int,
    stop: int,
    transposed: bool,
) -> Float[Array, "T N O"]:
    # Not preferred_element_type=float32: XLA's CPU backend compiles a transposed product of
    # bfloat16 to a kernel it does not have (jax 0.10.2). It adds up in float32 either way.
    return jnp.einsum(
        "tnk,nko->tno" if transposed else "tnk,nok->tno",
        x,
        weight[:, start:stop],
        precision=jax.lax.Precision.HIGHEST,
    )
