"""`grouped_gemm` by the C++ handlers. FP8 operands are widened to float32 first."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedWeight
from custom_calls.quantize.reference import dequantize_tokens, dequantize_weight


def contiguous(
    tokens: ContiguousTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "M N"]:
    x = tokens.x
    (y,) = cpu_library.call(
        "jaxmoe_cpu_grouped_gemm_contiguous",
        (jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), x.dtype),),
        x,
        weights,
        tokens.group_sizes,
        alignment=tokens.alignment,
    )
    return y.astype(dtype)


def masked(
    tokens: MaskedTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "e C N"]:
    x = tokens.x
    (y,) = cpu_library.call(
        "jaxmoe_cpu_grouped_gemm_masked",
        (jax.ShapeDtypeStruct((*x.shape[:2], weights.shape[1]), x.dtype),),
        x,
        weights,
        tokens.counts,
    )
    return y.astype(dtype)


def contiguous_fp8(
    tokens: ContiguousTokens,
    weights: QuantizedWeight,
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "M N"]:
    return contiguous(
        dequantize_tokens(tokens),
        dequantize_weight(weights),
        dtype=dtype,
        expected_rows=expected_rows,
    )


def masked_fp8(
    tokens: MaskedTokens, weights: QuantizedWeight, *, dtype: jnp.dtype, expected_rows: int | None
) -> Float[Array, "e C N"]:
    return masked(
        dequantize_tokens(tokens),
        dequantize_weight(weights),
        dtype=dtype,
        expected_rows=expected_rows,
    )
