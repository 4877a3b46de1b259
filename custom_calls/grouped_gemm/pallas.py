"""`grouped_gemm` in bfloat16 by JAX's own Pallas kernel for Hopper, `ragged_dot_mgpu`.

Source: `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`, part of JAX, called as it is. It takes
groups that follow each other without gaps, multiplies tiles of block_m rows, and stores the rows of
a tile that its group owns; a tile past the last group costs as much as any other. Under `shard_map`
it needs `check_vma=False`: it does not say over which axes its result varies.

Not here: FP8, which the kernel does not have, and float32.
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from custom_calls.grouped_gemm.ragged_dot import padded_sizes
from custom_calls.layouts import ContiguousTokens, MaskedTokens


KERNEL = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"
SHARED_BYTES = 232448  # of one block on sm_90
DEPTH_MULTIPLE = 64  # 128 bytes of bfloat16, the widest swizzled row in shared memory
OUT_MULTIPLE = 8  # 16 bytes of bfloat16, to which TMA wants rows aligned


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A tile of the output, the pieces of depth in shared memory at a time, and the tile order.

    Attributes:
      grid_block_n: columns of tiles that are walked together, so that their weights stay in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int

    @property
    def shared_bytes(self) -> int:
        stage = (self.block_m + self.block_n) * self.block_k * 2
        return self.max_concurrent_steps * stage + self.block_m * self.block_n * 2


# One warp group holds the sums of a tile in registers: 128 x 128 or 64 x 256 take half of them.
CONFIGURATIONS = (
    Configuration(128, 128, 64, 5, 8),
    Configuration(128, 128, 64, 4, 2),
    Configuration(64, 256, 64, 4, 4),
    Configuration(64, 128, 64, 6, 8),
)
DEFAULT = CONFIGURATIONS[0]
DEFAULT_FEW_ROWS = CONFIGURATIONS[3]
FEW_ROWS = 64  # a tile of the default would be half empty


@functools.cache
def missing() -> str | None:
    """Why the kernel cannot run here, or None when it can."""
    try:
        importlib.import_module(KERNEL)
    except ImportError as error:
        return f"{KERNEL} cannot be imported ({error})"
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        if capability is None or capability.split(".")[0] != "9":
            return f"the kernel is for compute capability 9.x (Hopper), {device} has {capability}"
    return None


def contiguous(
    tokens: ContiguousTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
    configuration: Configuration | None = None,
) -> Float[Array, "M N"]:
    rows = tokens.x.shape[0] // max(weights.shape[0], 1) if expected_rows is None else expected_rows
    return _ragged_dot(tokens.x, weights, padded_sizes(tokens), configuration or _default(rows))


def masked(
    tokens: MaskedTokens,
    weights: Float[Array, "e N K"],
    *,
    dtype: jnp.dtype,
    expected_rows: int | None,
    configuration: Configuration | None = None,
) -> Float[Array, "e C N"]:
    # The kernel has no counts: it multiplies whole slabs.
    num_groups, capacity, depth = tokens.x.shape
    sizes = jnp.full((num_groups,), capacity, jnp.int32)
    x = tokens.x.reshape(num_groups * capacity, depth)
    y = _ragged_dot(x, weights, sizes, configuration or _default(capacity))
    return y.reshape(num_groups, capacity, weights.shape[1])


def configurations(num_out: int, depth: int) -> Iterator[Configuration]:
    """Those of `CONFIGURATIONS` that fit a matrix [num_out, depth]."""
    for each in CONFIGURATIONS:
        if depth % each.block_k == 0 and each.block_n <= max(num_out, 128):
            yield each


def _default(rows: int) -> Configuration:
    return DEFAULT_FEW_ROWS if rows <= FEW_ROWS else DEFAULT


def _ragged_dot(
    x: Float[Array, "M K"],
    weights: Float[Array, "e N K"],
    sizes: Int32[Array, " e"],
    configuration: Configuration,
) -> Float[Array, "M N"]:
    num_rows, depth = x.shape
    num_out = weights.shape[1]
    if depth % DEPTH_MULTIPLE or num_out % OUT_MULTIPLE:
        raise ValueError(
            f"'pallas' needs K to be a multiple of {DEPTH_MULTIPLE} and N of {OUT_MULTIPLE}, got "
            f"K {depth} and N {num_out}"
        )
    if configuration.shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"{configuration} needs {configuration.shared_bytes} bytes of shared memory, there are "
            f"{SHARED_BYTES}"
        )
    if not (x.size and weights.size):
        return jnp.zeros((num_rows, num_out), x.dtype)
    return importlib.import_module(KERNEL).ragged_dot(
        x,
        weights,
        group_sizes=sizes,
        transpose_rhs=True,
        **dataclasses.asdict(configuration),
    )
