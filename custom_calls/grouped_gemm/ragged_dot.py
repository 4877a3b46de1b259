"""`grouped_gemm` by XLA's own products, on any platform. FP8 is not here: "reference" widens it.

What XLA makes of `jax.lax.ragged_dot` on a GPU depends on flags: every row times every group's
weights by default, cuDNN's grouped product with `--xla_gpu_experimental_use_ragged_dot_fusion`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.varying import as_varying, varying_axes


def contiguous(
    tokens: ContiguousTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "M N"]:
    x, sizes = tokens.x, padded_sizes(tokens)
    if not (x.size and weights.size):
        return jnp.zeros((x.shape[0], weights.shape[1]), dtype)
    axes = varying_axes(x, sizes, weights)
    return jax.lax.ragged_dot_general(
        as_varying(x, axes),
        as_varying(weights, axes),
        as_varying(sizes, axes),
        # The depth of the weights is contracted where it lies, last: no transposed copy.
        jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
        precision=_precision(x),
        preferred_element_type=dtype,
    )


def masked(
    tokens: MaskedTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
) -> Float[Array, "e C N"]:
    # All groups have C rows of room, so nothing is ragged: a batched product of whole slabs does
    # the same work without a mask. Rows past a count are multiplied too.
    return jax.lax.dot_general(
        tokens.x,
        weights,
        (((2,), (2,)), ((0,), (0,))),
        precision=_precision(tokens.x),
        preferred_element_type=dtype,
    )


def padded_sizes(tokens: ContiguousTokens) -> Int32[Array, " e"]:
    """Sizes for which groups that follow each other without gaps start where the tokens' do.

    They add up to M at most, whatever `group_sizes` says.
    """
    num_rows = tokens.x.shape[0]
    alignment = min(tokens.alignment, max(num_rows, 1))  # one that exceeds M must not overflow
    # Clipped before they are added up, which so stays far from overflow.
    sizes = jnp.clip(tokens.group_sizes, 0, num_rows)
    padded = jnp.minimum(-(-sizes // alignment) * alignment, num_rows)
    ends = jnp.minimum(jnp.cumsum(padded), num_rows)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1])).astype(jnp.int32)


def _precision(x: Array) -> jax.lax.Precision | None:
    # float32 would be rounded to TF32 on GPUs; bfloat16 loses nothing by default.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
