"""The ops of `permute` by Triton kernels.

Rows are found in two steps over blocks of copies: how many copies of each group a block has, then,
from the counts of all blocks before it, where its own copies go. The copying is a kernel of its
own that reads a token once and writes it to all its rows.
"""

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int32, Shaped

from custom_calls import triton_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens


MAX_BLOCKS = 128  # of copies; every one reads the counts of all, so few of them
PART_BYTES = 2048  # of a row for one program: 16 for each thread
INDEX_WARPS = 8
COPY_WARPS = 4


def permute_contiguous(
    x: Shaped[Array, "T H"],
    group_idx: Int32[Array, "T K"],
    *,
    num_groups: int,
    max_rows: int,
    alignment: int,
) -> tuple[ContiguousTokens, Int32[Array, "T K"]]:
    row_of, sizes = _find_rows(group_idx, num_groups, max_rows, alignment, is_masked=False)
    return ContiguousTokens(_copy_rows(x, row_of, max_rows), sizes, alignment), row_of


def permute_masked(
    x: Shaped[Array, "T H"], group_idx: Int32[Array, "T K"], *, num_groups: int, capacity: int
) -> tuple[MaskedTokens, Int32[Array, "T K"]]:
    row_of, counts = _find_rows(group_idx, num_groups, capacity, 1, is_masked=True)
    rows = _copy_rows(x, row_of, num_groups * capacity)
    return MaskedTokens(rows.reshape(num_groups, capacity, x.shape[1]), counts), row_of


def unpermute(
    rows: Float[Array, "M H"], row_of: Int32[Array, "T K"], weights: Float32[Array, "T K"]
) -> Float[Array, "T H"]:
    num_rows, hidden = rows.shape
    num_tokens, top_k = row_of.shape
    if not (rows.size and row_of.size):
        return jnp.zeros((num_tokens, hidden), rows.dtype)
    y_type = jax.ShapeDtypeStruct((num_tokens, hidden), rows.dtype)
    (y,) = triton_library.call(
        _unpermute_kernel,
        rows,
        row_of,
        weights,
        results=(y_type,),
        NUM_ROWS=num_rows,
        TOP_K=top_k,
        **_parts(y_type),
    )
    return y


def _find_rows(
    group_idx: Int32[Array, "T K"], num_groups: int, bound: int, alignment: int, *, is_masked: bool
) -> tuple[Int32[Array, "T K"], Int32[Array, " e"]]:
    """The row of each copy and the size of each group."""
    num_copies = group_idx.size
    if not (num_copies and num_groups):
        return jnp.full_like(group_idx, -1), jnp.zeros(num_groups, jnp.int32)
    groups = triton.next_power_of_2(max(16, num_groups))
    # Copies are compared with all groups at once, in registers.
    copies = max(16, min(128, 2**15 // groups))
    steps = triton.cdiv(num_copies, copies * MAX_BLOCKS)
    num_blocks = triton.cdiv(num_copies, copies * steps)
    constants = {
        "num_warps": INDEX_WARPS,
        "grid": (num_blocks,),
        "NUM_COPIES": num_copies,
        "NUM_GROUPS": num_groups,
        "GROUPS": groups,
        "COPIES": copies,
        "STEPS": steps,
    }
    (counts,) = triton_library.call(
        _count_kernel,
        group_idx,
        results=(jax.ShapeDtypeStruct((num_blocks, num_groups), jnp.int32),),
        **constants,
    )
    row_of, sizes = triton_library.call(
        _row_kernel,
        group_idx,
        counts,
        results=(
            jax.ShapeDtypeStruct(group_idx.shape, jnp.int32),
            jax.ShapeDtypeStruct((num_groups,), jnp.int32),
        ),
        NUM_BLOCKS=num_blocks,
        BLOCKS=max(2, min(32, 2**13 // groups)),
        BOUND=bound,
        ALIGNMENT=alignment,
        IS_MASKED=is_masked,
        **constants,
    )
    return row_of, sizes


def _copy_rows(
    x: Shaped[Array, "T H"], row_of: Int32[Array, "T K"], num_rows: int
) -> Shaped[Array, "M H"]:
    words = _as_words(x)
    if not (words.size and row_of.size and num_rows):
        return jnp.zeros((num_rows, x.shape[1]), x.dtype)
    (rows,) = triton_library.call(
        _copy_kernel,
        words,
        row_of,
        results=(jax.ShapeDtypeStruct((num_rows, words.shape[1]), words.dtype),),
        TOP_K=row_of.shape[1],
        **_parts(words),
    )
    return _from_words(rows, x)


def _parts(tokens: jax.ShapeDtypeStruct | Array) -> dict[str, Any]:
    """The launch of a program for each part of each token."""
    num_tokens, hidden = tokens.shape
    columns = PART_BYTES // tokens.dtype.itemsize
    return {
        "grid": (num_tokens * triton.cdiv(hidden, columns),),
        "num_warps": COPY_WARPS,
        "HIDDEN": hidden,
        "COLUMNS": columns,
    }


_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def _as_words(x: Shaped[Array, "T H"]) -> Shaped[Array, "T words"]:
    """The bytes of x as unsigned integers, which every version of Triton can copy."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
    return words.reshape(x.shape[0], words.size // max(1, x.shape[0]))


def _from_words(words: Shaped[Array, "M words"], x: Shaped[Array, "T H"]) -> Shaped[Array, "M H"]:
    if x.dtype == jnp.bool_:
        return words.astype(jnp.bool_)
    if x.dtype.itemsize == 8:
        words = words.reshape(*words.shape[:-1], x.shape[1], 2)
    return jax.lax.bitcast_convert_type(words, x.dtype)


# Without type checks: those of the tests wrap functions, and Triton reads their source.
@triton.jit
@no_type_check
def _count_kernel(
    group_idx,
    counts,
    NUM_COPIES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    COPIES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """How many of the copies of this block each group has."""
    block = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    count = tl.full([GROUPS], 0, tl.int32)
    for step in range(STEPS):
        copy = (block * STEPS + step) * COPIES + tl.arange(0, COPIES)
        group_of = tl.load(group_idx + copy, mask=copy < NUM_COPIES, other=-1)
        count += tl.sum((group_of[:, None] == group[None, :]).to(tl.int32), 0)
    tl.store(counts + block * NUM_GROUPS + group, count, mask=group < NUM_GROUPS)


@triton.jit
@no_type_check
def _row_kernel(
    group_idx,
    counts,
    row_of,
    sizes,
    NUM_COPIES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    COPIES: tl.constexpr,
    STEPS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BOUND: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """The row of every copy of this block."""
    this = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    size = tl.full([GROUPS], 0, tl.int32)
    before = tl.full([GROUPS], 0, tl.int32)
    for first in range(0, NUM_BLOCKS, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        count = tl.load(
            counts + block[:, None] * NUM_GROUPS + group[None, :],
            mask=(block < NUM_BLOCKS)[:, None] & (group < NUM_GROUPS)[None, :],
            other=0,
        )
        size += tl.sum(count, 0)
        before += tl.sum(tl.where((block < this)[:, None], count, 0), 0)
    if this == 0:
        tl.store(sizes + group, size, mask=group < NUM_GROUPS)
    if not IS_MASKED:
        padded = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        before += tl.cumsum(padded, 0) - padded

    lane = tl.arange(0, COPIES)
    for step in range(STEPS):
        copy = (this * STEPS + step) * COPIES + lane
        group_of = tl.load(group_idx + copy, mask=copy < NUM_COPIES, other=-1)
        is_member = group_of[:, None] == group[None, :]
        other_group_of = tl.load(
            group_idx + (this * STEPS + step) * COPIES + lane[None, :],
            mask=(this * STEPS + step) * COPIES + lane[None, :] < NUM_COPIES,
            other=-1,
        )
        is_earlier = (group_of[:, None] == other_group_of) & (lane[:, None] > lane[None, :])
        row = tl.sum(tl.where(is_member, before[None, :], 0), 1)
        row += tl.sum(is_earlier.to(tl.int32), 1)
        has_row = (group_of >= 0) & (group_of < NUM_GROUPS) & (row < BOUND)
        if IS_MASKED:
            row += tl.where(has_row, group_of, 0) * BOUND
        tl.store(row_of + copy, tl.where(has_row, row, -1), mask=copy < NUM_COPIES)
        before += tl.sum(is_member.to(tl.int32), 0)


@triton.jit
@no_type_check
def _copy_kernel(x, row_of, rows, TOP_K: tl.constexpr, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    parts = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.load(x + token.to(tl.int64) * HIDDEN + column, mask=column < HIDDEN)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of + token * TOP_K + k)
        target = rows + row.to(tl.int64) * HIDDEN + column
        tl.store(target, number, mask=column < tl.where(row >= 0, HIDDEN, 0))


@triton.jit
@no_type_check
def _unpermute_kernel(
    rows,
    row_of,
    weights,
    y,
    NUM_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    parts = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full([COLUMNS], 0.0, tl.float32)
    # Masks, not branches, so that all rows of a token are on their way at once.
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of + token * TOP_K + k)
        weight = tl.load(weights + token * TOP_K + k)
        has_row = (row >= 0) & (row < NUM_ROWS)
        source = rows + row.to(tl.int64) * HIDDEN + column
        copy = tl.load(source, mask=column < tl.where(has_row, HIDDEN, 0), other=0.0)
        total = tl.where(has_row, total + weight * copy.to(tl.float32), total)
    target = y + token.to(tl.int64) * HIDDEN + column
    tl.store(target, total.to(y.dtype.element_ty), mask=column < HIDDEN)
