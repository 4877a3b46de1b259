"""One kernel: what it multiplies, its tile, and the source that instantiates it."""

import dataclasses
import hashlib

from custom_calls.deep_gemm import tiles
from custom_calls.deep_gemm.tiles import Layout, Problem, Tile


NUM_TMA_THREADS = 128

_GEMM_TYPES = {
    Layout.DENSE: "Normal",
    # The sizes of groups, not a group for each row: rows past the last group cost nothing.
    Layout.CONTIGUOUS: "MGroupedContiguousWithPsumLayout",
    Layout.MASKED: "MGroupedMasked",
}

_FP8_SOURCE = """\
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
static void instantiate() {{
  auto kernel = reinterpret_cast<void*>(&deep_gemm::sm90_fp8_gemm_1d2d_impl<
      cute::UMMA::Major::K, 0, {num_out}, {depth}, {num_groups}, {block_m}, {block_n}, 128,
      128, 128, {swizzle_d}, {num_stages}, {num_tma_threads}, {num_math_threads},
      {multicast}, {shares_rows}, {num_sms}, deep_gemm::GemmType::{gemm_type},
      cutlass::bfloat16_t>);
}}
"""
_BF16_SOURCE = """\
#include <deep_gemm/impls/sm90_bf16_gemm.cuh>
static void instantiate() {{
  auto kernel = reinterpret_cast<void*>(&deep_gemm::sm90_bf16_gemm_impl<
      cute::UMMA::Major::K, cute::UMMA::Major::K, 0, {num_out}, {depth}, {num_groups},
      {block_m}, {block_n}, 64, 128, 128, {swizzle_d}, {num_stages}, {num_tma_threads},
      {num_math_threads}, {multicast}, {shares_rows}, {num_sms},
      deep_gemm::GemmType::{gemm_type}, false, cutlass::bfloat16_t>);
}}
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A tile of a problem. Rows are not compiled in."""

    problem: Problem
    tile: Tile

    @property
    def source(self) -> str:
        problem, tile = self.problem, self.tile
        template = _FP8_SOURCE if problem.is_fp8 else _BF16_SOURCE
        return template.format(
            num_out=problem.num_out,
            depth=problem.depth,
            num_groups=problem.num_groups,
            block_m=tile.block_m,
            block_n=tile.block_n,
            swizzle_d=tile.swizzle_d,
            num_stages=tile.num_stages,
            num_tma_threads=NUM_TMA_THREADS,
            num_math_threads=tile.num_math_threads,
            multicast=tile.multicast,
            shares_rows="true" if tile.shares_rows else "false",
            num_sms=problem.num_sms,
            gemm_type=_GEMM_TYPES[problem.layout],
        )

    @property
    def id(self) -> int:
        """The same in every process: programs name a kernel by it."""
        digest = hashlib.sha256(self.source.encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    @property
    def launch(self) -> dict[str, int]:
        """What the handler needs to know of it."""
        problem, tile = self.problem, self.tile
        return dict(
            layout=problem.layout.value,
            num_groups=problem.num_groups,
            num_out=problem.num_out,
            depth=problem.depth,
            block_m=tile.block_m,
            block_n=tile.block_n,
            swizzle_d=tile.swizzle_d,
            num_threads=NUM_TMA_THREADS + tile.num_math_threads,
            shared_bytes=tiles.shared_bytes(problem, tile),
            cluster_size=tile.multicast,
            num_sms=problem.num_sms,
        )

    def __str__(self) -> str:
        problem, tile = self.problem, self.tile
        kind = "fp8" if problem.is_fp8 else "bf16"
        shared = f", {'rows' if tile.shares_rows else 'columns'} shared" * (tile.multicast > 1)
        return (
            f"{kind} {problem.layout.name.lower()} [{problem.num_groups}, {problem.num_out}, "
            f"{problem.depth}] in {tile.block_m} x {tile.block_n}, {tile.num_stages} stages{shared}"
        )
