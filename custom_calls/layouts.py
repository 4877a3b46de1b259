"""The two layouts of tokens sorted by group (by expert, in a model), and FP8 beside its scales.

Contract: rows that belong to no group hold unspecified values, NaN included, and no op reads them.
Sizes and counts may exceed the room there is; then rows are missing, and the numbers say how many.
Which op makes or takes a layout is not here.

FP8 is DeepSeek-V3's (arXiv:2412.19437, section 3.3): float8_e4m3fn values, one float32 scale for
128 numbers in a row of tokens, one for a block of 128 x 128 weights; a value times its scale is the
number it stands for. Scales of tokens lie as DeepGEMM reads them: all rows of one block of columns
side by side, the number of rows rounded up to a multiple of 4.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


SCALE_BLOCK = 128

# The array fields are Any because the same classes, as pytrees, also carry PartitionSpecs, shapes
# and whatever else a tree_map returns; the ops check the arrays.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousTokens:
    """Rows sorted by group, each group starting at a multiple of `alignment`.

    Group g owns rows `group_starts[g] : group_starts[g] + group_sizes[g]`, as far as they exist:
    sizes that need more than M rows mean that the last rows are missing.
    """

    x: Any  # [M, H]
    group_sizes: Any  # i32[e]
    alignment: int = dataclasses.field(default=1, metadata={"static": True})
    scale: Any = None  # f32[num_scale_blocks(H), num_scale_rows(M)] when x is float8

    @property
    def group_starts(self) -> Int32[Array, " e"]:
        """The first row of each group: the sum of the sizes before it, each rounded up."""
        padded = -(-self.group_sizes // self.alignment) * self.alignment
        return (jnp.cumsum(padded) - padded).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """A block of C rows for each group, filled from the front.

    Group g owns rows `x[g, : counts[g]]`; a count above C means that the rows past C are missing.
    """

    x: Any  # [e, C, H]
    counts: Any  # i32[e]
    scale: Any = None  # f32[e, num_scale_blocks(H), num_scale_rows(C)] when x is float8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedRows:
    """FP8 rows that belong to no group."""

    values: Any  # f8[M, K]
    scale: Any  # f32[num_scale_blocks(K), num_scale_rows(M)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """An FP8 matrix, or a stack of them, stored (out, in); the last blocks may be cut."""

    values: Any  # f8[*groups, N, K]
    scale: Any  # f32[*groups, num_scale_blocks(N), num_scale_blocks(K)]


def num_scale_blocks(size: int) -> int:
    """The scales along an axis of this size: one for each block of 128, the last may be cut."""
    return -(-size // SCALE_BLOCK)


def num_scale_rows(num_rows: int) -> int:
    """The rows the scales of this many tokens are stored for: a multiple of 4, as TMA asks."""
    return -(-num_rows // 4) * 4
