"""Which tile of the output a thread block computes: the choices there are, and a cost to choose by.

A kernel walks over tiles of block_m rows by block_n columns. For every 128 of the depth a block
brings `(block_m + block_n) * 128` bytes from L2 to shared memory (half of one side when two blocks
share it, multicast), and what L2 does not have from memory, while the tensor cores work on what
came before; whichever takes longest sets the pace, and hides most of the rest. Tiles are dealt to
the SMs in waves; in the last one fewer blocks share the memory. The constants are fitted to times
measured on an H200 (`benchmarks/deep_gemm_tiles.py`).
"""

import dataclasses
import enum
import math
from collections.abc import Iterator


SHARED_BYTES = 232448  # of one block on sm_90
SCALE_BLOCK = 128
MAX_STAGES = 32


class Layout(enum.Enum):
    """How rows belong to groups; the values are those of `csrc/deep_gemm.h`."""

    DENSE = 0
    CONTIGUOUS = 1
    MASKED = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is multiplied, as far as a tile depends on it.

    Attributes:
      rows: of all groups when dense, of one group on average otherwise.
      block_m: the only height allowed, None for any: contiguous groups start at its multiples.
    """

    is_fp8: bool
    layout: Layout
    rows: int
    num_groups: int
    num_out: int
    depth: int
    num_sms: int
    block_m: int | None = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """Attributes:
    num_stages: pieces of the depth in shared memory at a time.
    multicast: blocks that share one side's bytes, 1 or 2.
    shares_rows: the side is that of the rows (blocks next to each other along the columns).
    """

    block_m: int
    block_n: int
    num_stages: int
    multicast: int = 1
    shares_rows: bool = False

    @property
    def swizzle_d(self) -> int:
        """Bytes of a row of the output tile in shared memory that are swizzled together."""
        return next(size for size in (128, 64, 32) if self.block_n * 2 % size == 0)

    @property
    def num_math_threads(self) -> int:
        return 128 if self.block_m <= 64 else 256


def choose_tile(problem: Problem) -> Tile:
    """The cheapest tile; among equals the one with the most work for each block."""
    return min(
        candidates(problem),
        key=lambda tile: (cost(problem, tile), -tile.block_m * tile.block_n),
    )


def candidates(problem: Problem) -> Iterator[Tile]:
    """Every tile the kernel can be compiled for."""
    heights = (problem.block_m,) if problem.block_m else (64, 128)
    for block_m in heights:
        for block_n in range(16, 257, 16):
            if block_n > 16 and block_n >= problem.num_out + 16:
                continue
            if not problem.block_m and block_m > 2 * max(block_n, 32):
                continue  # a square one of the same size brings less: up to 45% faster
            if not _fits_registers(problem, block_m, block_n):
                continue
            num_stages = _num_stages(problem, block_m, block_n)
            if num_stages < 2:
                continue
            for multicast, shares_rows in ((1, False), (2, True), (2, False)):
                tile = Tile(block_m, block_n, num_stages, multicast, shares_rows)
                if _can_share(problem, tile):
                    yield tile


def shared_bytes(problem: Problem, tile: Tile) -> int:
    """Shared memory of the kernel: output tile, stages, scales, barriers."""
    fixed, stage = _shared_bytes(problem, tile.block_m, tile.block_n)
    return fixed + tile.num_stages * stage


def cost(problem: Problem, tile: Tile) -> float:
    """Estimated cycles of an SM."""
    blocks_of_group = math.ceil(max(problem.rows, 1) / tile.block_m)
    is_grouped = problem.layout is not Layout.DENSE
    blocks_m = blocks_of_group * (problem.num_groups if is_grouped else 1)
    blocks_n = math.ceil(problem.num_out / tile.block_n)
    rows, columns = float(tile.block_m), float(tile.block_n)
    compute = rows * columns / (FP8_PRODUCTS if problem.is_fp8 else BF16_PRODUCTS)
    if problem.is_fp8:
        # Scaling the partial sums waits for the tensor cores; two warp groups hide each other's.
        compute += columns * (PROMOTION if tile.block_m <= 64 else PROMOTION / 2) + PROMOTION_START
        # Only few places where a weight scale can change within a tile are compiled in.
        if SCALE_BLOCK // math.gcd(SCALE_BLOCK, tile.block_n) > 4:
            compute *= UNKNOWN_BOUNDARY
    width = SCALE_BLOCK if problem.is_fp8 else 2 * SCALE_BLOCK
    # Blocks that use the same bytes run at about the same time: one brings them to L2 for all.
    from_memory = (rows / blocks_n + columns / blocks_of_group) * width
    if tile.multicast == 2:
        rows, columns = (rows / 2, columns) if tile.shares_rows else (rows, columns / 2)
    load = (rows + columns) * width / L2_BYTES
    steps = math.ceil(problem.depth / SCALE_BLOCK)

    def wave(num_blocks: int) -> float:
        memory = from_memory / min(MEMORY_BYTES / num_blocks, MEMORY_BYTES_OF_SM)
        longest, total = max(compute, load, memory), compute + load + memory
        step = longest + UNHIDDEN * (total - longest)
        return steps * step * (SHARING if tile.multicast == 2 else 1.0) + TILE_START

    full, rest = divmod(blocks_m * blocks_n, problem.num_sms)
    return (full * wave(problem.num_sms) if full else 0.0) + (wave(rest) if rest else 0.0)


FP8_PRODUCTS = 32.0  # rows x columns x 128 multiplied in a cycle, over 128
BF16_PRODUCTS = 16.0
PROMOTION = 0.36
PROMOTION_START = 100.0
UNKNOWN_BOUNDARY = 1.27
L2_BYTES = 47.0  # from L2 to one SM in a cycle
MEMORY_BYTES = 2170.0  # from memory to all SMs in a cycle
MEMORY_BYTES_OF_SM = 18.0  # and at most to one
UNHIDDEN = 0.05  # of what goes on beside the longest
SHARING = 0.95  # less traffic leaves more power to the tensor cores
TILE_START = 80.0


def _fits_registers(problem: Problem, block_m: int, block_n: int) -> bool:
    if not problem.is_fp8:
        return block_m <= 64 or block_n <= 256
    # A tile may touch two rows of weight scales, and whole groups of 8 columns belong to each.
    if block_n > SCALE_BLOCK and math.gcd(block_n, SCALE_BLOCK) != block_n - SCALE_BLOCK:
        return False
    # Partial and final sums: 2 x block_n / 2 registers of a thread's 232.
    return block_n <= 192


def _num_stages(problem: Problem, block_m: int, block_n: int) -> int:
    fixed, stage = _shared_bytes(problem, block_m, block_n)
    return min(MAX_STAGES, (SHARED_BYTES - fixed) // stage)


def _shared_bytes(problem: Problem, block_m: int, block_n: int) -> tuple[int, int]:
    """Bytes whatever the stages, and bytes of each stage."""
    barriers = 2 * 8
    output = -(-block_m * block_n * 2 // 1024) * 1024
    if not problem.is_fp8:
        return output, (block_m + block_n) * 128 + barriers
    scale_rows = 1 if SCALE_BLOCK % block_n == 0 else 2
    weight_scales = -(-problem.depth // SCALE_BLOCK) * scale_rows * 4
    fixed = output + -(-weight_scales // 8) * 8
    return fixed, (block_m + block_n) * 128 + -(-block_m * 4 // 128) * 128 + barriers


def _can_share(problem: Problem, tile: Tile) -> bool:
    if tile.multicast == 1:
        return True
    # Where memory sets the pace sharing saves nothing, and two blocks wait for each other.
    if problem.num_sms % 2 or problem.layout is Layout.MASKED:
        return False
    blocks_n = -(-problem.num_out // tile.block_n)
    blocks_m = -(-problem.rows // tile.block_m)
    if problem.layout is Layout.DENSE:
        return (blocks_n if tile.shares_rows else blocks_m) > 1
    # A pair of blocks must not straddle two groups: an even number of tiles in every row of them.
    if blocks_n % 2:
        return False
    return tile.shares_rows or blocks_m > 1
