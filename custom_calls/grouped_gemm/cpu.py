"""`grouped_gemm` by the C++ handlers."""

import jax
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens


def contiguous(tokens: ContiguousTokens, weights: Float[Array, "e N K"]) -> Float[Array, "M N"]:
    x = tokens.x
    (y,) = cpu_library.call(
        "jaxmoe_cpu_grouped_gemm_contiguous",
        (jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), x.dtype),),
        x,
        weights,
        tokens.group_sizes,
        alignment=tokens.alignment,
    )
    return y


def masked(tokens: MaskedTokens, weights: Float[Array, "e N K"]) -> Float[Array, "e C N"]:
    x = tokens.x
    (y,) = cpu_library.call(
        "jaxmoe_cpu_grouped_gemm_masked",
        (jax.ShapeDtypeStruct((*x.shape[:2], weights.shape[1]), x.dtype),),
        x,
        weights,
        tokens.counts,
    )
    return y
