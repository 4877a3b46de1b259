"""`silu_and_mul` by the C++ handlers."""

import jax
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens


def contiguous(tokens: ContiguousTokens) -> Float[Array, "M F"]:
    (y,) = cpu_library.call(
        "jaxmoe_cpu_silu_and_mul_contiguous",
        (_half(tokens.x),),
        tokens.x,
        tokens.group_sizes,
        alignment=tokens.alignment,
    )
    return y


def masked(tokens: MaskedTokens) -> Float[Array, "e C F"]:
    (y,) = cpu_library.call(
        "jaxmoe_cpu_silu_and_mul_masked", (_half(tokens.x),), tokens.x, tokens.counts
    )
    return y


def _half(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
