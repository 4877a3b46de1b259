"""What `silu_and_mul` means, in plain JAX: of every row, also of those that no group owns."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.layouts import ContiguousTokens, MaskedTokens


def silu_and_mul(tokens: ContiguousTokens | MaskedTokens) -> Float[Array, "*rows F"]:
    gate, up = jnp.split(tokens.x.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(tokens.x.dtype)
