"""The ops of `quantize` by Triton kernels. Rows of no group are neither read nor written.

A program quantises tiles of a few rows by a few blocks of 128 columns: reads and writes are 16
bytes wide along a row, and the scales of the rows, side by side in memory, fill whole sectors. The
grid does not follow the bound on rows, which for tokens can be many times the rows there are: a
fixed number of programs shares the tiles that the group sizes ask for.
"""

import dataclasses
from typing import Any, TypeVar, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Float

from custom_calls import triton_library
from custom_calls.layouts import (
    SCALE_BLOCK,
    ContiguousTokens,
    MaskedTokens,
    QuantizedRows,
    num_scale_blocks,
    num_scale_rows,
)
from custom_calls.quantize.reference import FP8, FP8_MAX, MIN_BLOCK_MAX


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

TILE_ROWS = 8  # 8 scales of a block are one sector of 32 bytes
TILE_BLOCKS = 4
NUM_WARPS = 4
# 16 for each of the 132 SMs of an H100 or H200, as many as can be resident.
MAX_PROGRAMS = 16 * 132

# As bits, because integer maxima of magnitudes are the float ones but for NaN, which wins.
_MIN_BLOCK_MAX_BITS = int(np.float32(MIN_BLOCK_MAX).view(np.int32))


def quantize_rows(x: Float[Array, "M K"]) -> QuantizedRows:
    num_rows, depth = x.shape
    blocks, scale_rows = num_scale_blocks(depth), num_scale_rows(num_rows)
    results = _results((num_rows, depth), (blocks, scale_rows))
    if not x.size:
        return QuantizedRows(*(jnp.zeros(result.shape, result.dtype) for result in results))
    values, scale = triton_library.call(
        _quantize_rows_kernel,
        x,
        results=results,
        grid=(_num_row_tiles(num_rows) * _num_column_tiles(depth),),
        NUM_ROWS=num_rows,
        SCALE_ROWS=scale_rows,
        **_tile(depth, is_gated=False),
    )
    return QuantizedRows(values, scale)


def quantize(tokens: Tokens) -> Tokens:
    return _quantize_tokens(tokens, tokens.x.shape[-1], is_gated=False)


def silu_and_mul_quantize(tokens: Tokens) -> Tokens:
    return _quantize_tokens(tokens, tokens.x.shape[-1] // 2, is_gated=True)


def _quantize_tokens(tokens: Tokens, depth: int, *, is_gated: bool) -> Tokens:
    is_masked = isinstance(tokens, MaskedTokens)
    sizes = tokens.counts if isinstance(tokens, MaskedTokens) else tokens.group_sizes
    *groups, num_rows = tokens.x.shape[:-1]
    scale_rows = num_scale_rows(num_rows)
    results = _results((*groups, num_rows, depth), (*groups, num_scale_blocks(depth), scale_rows))
    if not tokens.x.size or not sizes.size:
        values, scale = (jnp.zeros(result.shape, result.dtype) for result in results)
        return dataclasses.replace(tokens, x=values, scale=scale)
    num_groups = sizes.size
    # A group of a contiguous layout may begin a tile that it does not fill.
    row_tiles = (
        num_groups * _num_row_tiles(num_rows)
        if is_masked
        else (_num_row_tiles(num_rows) + num_groups)
    )
    num_programs = min(MAX_PROGRAMS, row_tiles * _num_column_tiles(depth))
    values, scale = triton_library.call(
        _quantize_tokens_kernel,
        tokens.x,
        sizes,
        results=results,
        grid=(num_programs,),
        NUM_PROGRAMS=num_programs,
        NUM_ROWS=num_rows,
        SCALE_ROWS=scale_rows,
        NUM_GROUPS=num_groups,
        GROUPS=triton.next_power_of_2(max(16, num_groups)),
        ALIGNMENT=1 if isinstance(tokens, MaskedTokens) else tokens.alignment,
        IS_MASKED=is_masked,
        **_tile(depth, is_gated=is_gated),
    )
    return dataclasses.replace(tokens, x=values, scale=scale)


def _results(
    values: tuple[int, ...], scale: tuple[int, ...]
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct(values, FP8), jax.ShapeDtypeStruct(scale, jnp.float32)


def _num_row_tiles(num_rows: int) -> int:
    return triton.cdiv(num_rows, TILE_ROWS)


def _num_column_tiles(depth: int) -> int:
    return triton.cdiv(num_scale_blocks(depth), TILE_BLOCKS)


def _tile(depth: int, *, is_gated: bool) -> dict[str, Any]:
    return {
        "num_warps": NUM_WARPS,
        "DEPTH": depth,
        "COLUMN_TILES": _num_column_tiles(depth),
        "SCALE_BLOCKS": num_scale_blocks(depth),
        "SCALE_BLOCK": SCALE_BLOCK,
        "FP8_MAX": FP8_MAX,
        "MIN_BLOCK_MAX_BITS": _MIN_BLOCK_MAX_BITS,
        "IS_GATED": is_gated,
        "ROWS": TILE_ROWS,
        "BLOCKS": TILE_BLOCKS,
    }


# Without type checks: those of the tests wrap functions, and Triton reads their source.
@triton.jit
@no_type_check
def _quantize_rows_kernel(
    x,
    values,
    scale,
    NUM_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_BLOCK_MAX_BITS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    tile = tl.program_id(0)
    row = tile // COLUMN_TILES * ROWS + tl.arange(0, ROWS)
    block = tile % COLUMN_TILES * BLOCKS + tl.arange(0, BLOCKS)
    is_row = row < NUM_ROWS
    largest = _quantize_tile(
        x,
        values,
        row,
        is_row,
        block,
        DEPTH,
        SCALE_BLOCK,
        FP8_MAX,
        MIN_BLOCK_MAX_BITS,
        IS_GATED,
    )
    tl.store(
        scale + block[None, :].to(tl.int64) * SCALE_ROWS + row[:, None],
        tl.where(is_row[:, None], largest * (1 / FP8_MAX), 0.0),
        mask=(row < SCALE_ROWS)[:, None] & (block < SCALE_BLOCKS)[None, :],
    )


@triton.jit
@no_type_check
def _quantize_tokens_kernel(
    x,
    sizes,
    values,
    scale,
    NUM_PROGRAMS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_MASKED: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    SCALE_BLOCKS: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_BLOCK_MAX_BITS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    size = tl.load(sizes + group, mask=group < NUM_GROUPS, other=0)
    if IS_MASKED:
        first = group * NUM_ROWS
        size = tl.minimum(size, NUM_ROWS)
    else:
        padded = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        first = tl.cumsum(padded, 0) - padded
        size = tl.minimum(size, NUM_ROWS - first)
    end = first + size
    tiles = (tl.maximum(size, 0) + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    # Row `tile * ROWS` of all tiles is this much further in x.
    shift = first - (tiles_end - tiles) * ROWS
    num_tiles = tl.sum(tiles, 0) * COLUMN_TILES

    for tile in range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
        row_tile = tile // COLUMN_TILES
        this = tl.sum((tiles_end <= row_tile).to(tl.int32), 0)
        row = row_tile * ROWS + tl.sum(tl.where(group == this, shift, 0), 0) + tl.arange(0, ROWS)
        is_row = row < tl.sum(tl.where(group == this, end, 0), 0)
        block = tile % COLUMN_TILES * BLOCKS + tl.arange(0, BLOCKS)
        largest = _quantize_tile(
            x,
            values,
            row,
            is_row,
            block,
            DEPTH,
            SCALE_BLOCK,
            FP8_MAX,
            MIN_BLOCK_MAX_BITS,
            IS_GATED,
        )
        scale_row = block[None, :].to(tl.int64)
        if IS_MASKED:
            scale_row += this.to(tl.int64) * SCALE_BLOCKS
            row -= this * NUM_ROWS
        tl.store(
            scale + scale_row * SCALE_ROWS + row[:, None],
            largest * (1 / FP8_MAX),
            mask=is_row[:, None] & (block < SCALE_BLOCKS)[None, :],
        )


@triton.jit
@no_type_check
def _quantize_tile(
    x,
    values,
    row,
    is_row,
    block,
    DEPTH: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MIN_BLOCK_MAX_BITS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Writes the values of a tile and returns the largest magnitude of each of its blocks."""
    column = block[:, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, :]
    mask = is_row[:, None, None] & (column < DEPTH)[None, :, :]
    row = row.to(tl.int64)[:, None, None]
    if IS_GATED:
        gate_at = x + row * (2 * DEPTH) + column[None, :, :]
        gate = tl.load(gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_at + DEPTH, mask=mask, other=0.0).to(tl.float32)
        number = (gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(x.dtype.element_ty)
    else:
        number = tl.load(x + row * DEPTH + column[None, :, :], mask=mask, other=0.0)
    number = number.to(tl.float32)
    magnitude = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.maximum(tl.max(magnitude, 2), MIN_BLOCK_MAX_BITS).to(tl.float32, bitcast=True)
    factor = tl.div_rn(FP8_MAX, largest)
    value = (number * factor[:, :, None]).to(tl.float8e4nv)
    tl.store(values + row * DEPTH + column[None, :, :], value, mask=mask)
    return largest
