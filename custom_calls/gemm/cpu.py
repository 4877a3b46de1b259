"""The ops of `gemm` by the C++ handlers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.layouts import QuantizedRows, QuantizedWeight
from custom_calls.quantize.reference import dequantize_rows, dequantize_weight


def gemm(
    x: Float[Array, "M K"], weight: Float[Array, "N K"], *, dtype: jnp.dtype
) -> Float[Array, "M N"]:
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    (y,) = cpu_library.call("jaxmoe_cpu_gemm", (result,), x, weight)
    return y


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
    num_out = weight.shape[2] if transposed else stop - start
    (y,) = cpu_library.call(
        "jaxmoe_cpu_gemm_by_head",
        (jax.ShapeDtypeStruct((*x.shape[:2], num_out), x.dtype),),
        x,
        weight,
        start=start,
        stop=stop,
        transposed=transposed,
    )
    return y
