"""`grouped_gemm` by DeepGEMM's kernels for Hopper.

A contiguous kernel is given where groups end and walks over their tiles only, so rows past the
last group cost nothing; a group must start at a multiple of its tile's height. A masked kernel
skips the tiles past a group's count. Both read weights and scales where they lie. `tile` is there
to measure other tiles than the one chosen.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.deep_gemm import library
from custom_calls.deep_gemm.kernel import Kernel
from custom_calls.deep_gemm.tiles import Layout, Problem, Tile, choose_tile
from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedWeight


ALIGNMENTS = (64, 128)
ROW_ALIGNMENT = 128
"""What contiguous groups should start at, and capacities of masked ones be a multiple of."""


def contiguous(
    tokens: ContiguousTokens,
    weights: Float[Array, "e N K"] | QuantizedWeight,
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
    tile: Tile | None = None,
) -> Float[Array, "M N"]:
    num_rows, alignment = tokens.x.shape[0], tokens.alignment
    if alignment not in ALIGNMENTS:
        raise ValueError(f"'deep_gemm' needs groups aligned to 64 or 128 rows, got {alignment}")
    # Sizes that exceed the rows end with them, at a whole tile so that no end is before its start.
    sizes = jnp.clip(tokens.group_sizes, 0, num_rows)
    ends = jnp.minimum(
        ContiguousTokens(tokens.x, sizes, alignment).group_starts + sizes,
        -(-num_rows // alignment) * alignment,
    )
    return _call(
        Layout.CONTIGUOUS,
        tokens,
        weights,
        ends,
        dtype=dtype,
        rows=expected_rows or num_rows // max(sizes.shape[0], 1),
        block_m=alignment,
        tile=tile,
    )


def masked(
    tokens: MaskedTokens,
    weights: Float[Array, "e N K"] | QuantizedWeight,
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
    tile: Tile | None = None,
) -> Float[Array, "e C N"]:
    capacity = tokens.x.shape[1]
    if capacity % min(ALIGNMENTS):
        raise ValueError(
            f"'deep_gemm' needs a masked capacity C that is a multiple of 64, got {capacity}"
        )
    # A tile of 128 rows would reach into the next group's slab.
    return _call(
        Layout.MASKED,
        tokens,
        weights,
        jnp.clip(tokens.counts, 0, capacity),
        dtype=dtype,
        rows=min(expected_rows or capacity, capacity),
        block_m=None if capacity % max(ALIGNMENTS) == 0 else min(ALIGNMENTS),
        tile=tile,
    )


def _call(
    layout: Layout,
    tokens: ContiguousTokens | MaskedTokens,
    weights: Float[Array, "e N K"] | QuantizedWeight,
    sizes: Array,
    *,
    dtype: jnp.dtype,
    rows: int,
    block_m: int | None,
    tile: Tile | None,
) -> Array:
    is_fp8 = isinstance(weights, QuantizedWeight)
    num_groups, num_out, depth = (weights.values if is_fp8 else weights).shape
    library.check(num_out, depth, is_fp8=is_fp8, dtype=dtype)
    shape = (*tokens.x.shape[:-1], num_out)
    if 0 in (*shape, depth, num_groups):
        return jnp.zeros(shape, dtype)
    problem = Problem(
        is_fp8, layout, rows, num_groups, num_out, depth, library.num_sms(), block_m=block_m
    )
    kernel = Kernel(problem, tile or choose_tile(problem))
    if isinstance(weights, QuantizedWeight):
        operands = (tokens.x, tokens.scale, weights.values, weights.scale, sizes)
    else:
        operands = (tokens.x, weights, sizes)
    return library.call(kernel, shape, *operands)
