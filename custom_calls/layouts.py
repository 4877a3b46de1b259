"""The two layouts in which tokens lie once they are sorted by group (by expert, in a model).

Contract: rows that belong to no group hold unspecified values, NaN included, and no op reads them.
Sizes and counts may exceed the room there is; then rows are missing, and the numbers say how many.
Which op makes or takes a layout is not here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


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
