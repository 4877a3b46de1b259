"""DeepGEMM without a GPU: which tile is chosen, what is compiled, and how cubins are kept."""

import concurrent.futures
import dataclasses
import stat
import types

import jax
import jax.numpy as jnp
import pytest

from custom_calls.deep_gemm import compiler, library, tiles
from custom_calls.deep_gemm.kernel import Kernel
from custom_calls.deep_gemm.tiles import Layout, Problem, Tile
from custom_calls.grouped_gemm import deep_gemm as grouped_gemm
from custom_calls.layouts import ContiguousTokens, MaskedTokens


NUM_SMS = 132


def _problem(layout, rows, num_out, depth, *, is_fp8=True, num_groups=8, block_m=None):
    num_groups = 1 if layout is Layout.DENSE else num_groups
    return Problem(is_fp8, layout, rows, num_groups, num_out, depth, NUM_SMS, block_m)


PROBLEMS = [
    _problem(layout, rows, num_out, depth, is_fp8=is_fp8, block_m=block_m)
    for is_fp8 in (True, False)
    for layout, block_m in (
        (Layout.DENSE, None),
        (Layout.CONTIGUOUS, 128),
        (Layout.CONTIGUOUS, 64),
        (Layout.MASKED, None),
    )
    for rows in (1, 64, 65, 2048)
    for num_out, depth in ((4096, 7168), (7168, 2048), (576, 7168), (512, 256), (48, 144))
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.layout.name}-{p.rows}-{p.num_out}")
def test_every_tile_can_run(problem):
    found = list(tiles.candidates(problem))
    assert tiles.choose_tile(problem) in found
    for tile in found:
        assert tiles.shared_bytes(problem, tile) <= tiles.SHARED_BYTES
        assert tile.num_stages >= 2
        assert problem.block_m in (None, tile.block_m)
        # Whole 16-column pieces of the tensor cores, and whole swizzled rows of the output.
        assert tile.block_n % 16 == 0
        assert tile.block_n * 2 % tile.swizzle_d == 0
        if tile.multicast == 2 and problem.layout is not Layout.DENSE:
            # A pair of blocks in one group, whatever the sizes.
            assert -(-problem.num_out // tile.block_n) % 2 == 0


def test_the_chosen_tile_is_among_the_fastest_measured():
    """Times of one run on an H200 (microseconds), tiles as (block_m, block_n, multicast, rows)."""
    measured = {
        _problem(Layout.CONTIGUOUS, 8192, 4096, 7168, block_m=128): {
            (128, 192, 2, False): 3013,
            (128, 192, 2, True): 3130,
            (128, 160, 2, False): 3242,
            (128, 128, 2, True): 3271,
        },
        _problem(Layout.CONTIGUOUS, 512, 4096, 7168, block_m=128): {
            (128, 128, 2, True): 214.5,
            (128, 128, 1, False): 219.2,
            (128, 192, 1, False): 226.3,
            (128, 160, 2, False): 227.7,
        },
        _problem(Layout.MASKED, 64, 4096, 7168, num_groups=32): {
            (64, 112, 1, False): 231.6,
            (64, 128, 1, False): 243.2,
            (64, 96, 1, False): 251.3,
            (64, 192, 1, False): 257.0,
        },
        _problem(Layout.MASKED, 64, 4096, 7168): {
            (64, 64, 1, False): 63.9,
            (64, 128, 1, False): 64.5,
            (64, 160, 1, False): 66.7,
            (64, 192, 1, False): 74.3,
        },
        _problem(Layout.DENSE, 4096, 7168, 16384): {
            (128, 160, 2, False): 787.2,
            (128, 128, 2, True): 793.6,
            (128, 192, 2, False): 817.1,
        },
        _problem(Layout.DENSE, 128, 4096, 7168): {
            (64, 64, 2, True): 16.8,
            (64, 64, 2, False): 17.7,
            (128, 32, 2, True): 24.4,
        },
    }
    for problem, times in measured.items():
        tile = tiles.choose_tile(problem)
        chosen = times[tile.block_m, tile.block_n, tile.multicast, tile.shares_rows]
        assert chosen <= 1.05 * min(times.values())


def test_kernels_are_told_apart_by_all_that_is_compiled_in():
    problem = _problem(Layout.MASKED, 64, 4096, 7168)
    tile = Tile(64, 128, 8)
    one = Kernel(problem, tile)
    assert one.id == Kernel(dataclasses.replace(problem, rows=1), tile).id  # rows are not
    others = [
        Kernel(dataclasses.replace(problem, **change), tile)
        for change in (
            {"is_fp8": False},
            {"layout": Layout.CONTIGUOUS},
            {"num_groups": 4},
            {"num_out": 2048},
            {"depth": 2048},
            {"num_sms": 100},
        )
    ] + [
        Kernel(problem, dataclasses.replace(tile, **change))
        for change in ({"block_n": 64}, {"num_stages": 4}, {"multicast": 2}, {"block_m": 128})
    ]
    ids = [each.id for each in (one, *others)]
    assert len(set(ids)) == len(ids)
    assert all(0 <= each < 2**63 for each in ids)


FAKE_NVCC = """#!/bin/sh
echo run >> {log}
for argument; do previous=$last; last=$argument; done
[ -n "{error}" ] && {{ echo "{error}" >&2; exit 2; }}
sleep 0.05
cat {folder}/content > "$last"
"""


@pytest.fixture
def toolchain(tmp_path, monkeypatch):
    """An nvcc that writes what it is told to, counted; returns a function that sets its error."""
    log, nvcc = tmp_path / "log", tmp_path / "nvcc"
    (tmp_path / "content").write_bytes(b"cubin")

    def write(error=""):
        nvcc.write_text(FAKE_NVCC.format(log=log, folder=tmp_path, error=error))
        nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)

    write()
    found = compiler.Toolchain(nvcc, "release 13.0", tmp_path / "include", "0.2.5")
    monkeypatch.setattr(compiler, "find_toolchain", lambda: found)
    monkeypatch.setattr(compiler, "cache_dir", lambda: tmp_path / "cache")
    write.runs = lambda: len(log.read_text().split()) if log.exists() else 0
    write.found = found
    return write


KERNEL = Kernel(_problem(Layout.DENSE, 128, 512, 256), Tile(64, 64, 4))


def test_a_kernel_is_compiled_once(toolchain, tmp_path):
    assert compiler.compile_kernel(KERNEL) == b"cubin"
    assert compiler.compile_kernel(KERNEL) == b"cubin"
    assert toolchain.runs() == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


@pytest.mark.parametrize("change", [{"headers_version": "0.2.6"}, {"nvcc_version": "release 13.1"}])
def test_another_version_is_compiled_again(change, toolchain, monkeypatch):
    compiler.compile_kernel(KERNEL)
    other = dataclasses.replace(toolchain.found, **change)
    monkeypatch.setattr(compiler, "find_toolchain", lambda: other)
    compiler.compile_kernel(KERNEL)
    assert toolchain.runs() == 2


def test_two_at_once_leave_one_whole_file(toolchain, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiler.compile_kernel, [KERNEL] * 4))
    assert results == [b"cubin"] * 4
    assert [path.read_bytes() for path in (tmp_path / "cache").iterdir()] == [b"cubin"]


def test_an_error_shows_the_command_and_what_it_said(toolchain, tmp_path):
    toolchain("no such tile")
    with pytest.raises(compiler.CompileError) as raised:
        compiler.compile_kernel(KERNEL)
    text = str(raised.value)
    assert "fp8 dense [1, 512, 256] in 64 x 64" in text
    assert "nvcc -std=c++20 -O3" in text
    assert "no such tile" in text
    assert "sm90_fp8_gemm_1d2d_impl<" in text
    assert not list((tmp_path / "cache").iterdir())
    toolchain()
    assert compiler.compile_kernel(KERNEL) == b"cubin"


def test_without_compiler_the_reason_is_raised(monkeypatch):
    monkeypatch.setattr(compiler, "find_toolchain", lambda: "nvcc is not on the PATH")
    with pytest.raises(RuntimeError, match="nvcc is not on the PATH"):
        compiler.compile_kernel(KERNEL)


@pytest.fixture
def library_calls(monkeypatch):
    """The kernels that were `loaded`, and the texts of those that `failed`."""
    calls = types.SimpleNamespace(loaded=[], failed=[])
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(library, "announce", lambda kernel: None)
    monkeypatch.setattr(library, "register", lambda kernel, cubin: calls.loaded.append(kernel))
    monkeypatch.setattr(library, "fail", lambda kernel, error: calls.failed.append(error))
    return calls


def test_requested_kernels_are_compiled_once_side_by_side(toolchain, library_calls):
    others = [Kernel(KERNEL.problem, Tile(64, 16 * n, 4)) for n in range(1, 4)]
    for each in (KERNEL, *others, KERNEL):
        compiler.request(each)
    compiler.wait()
    assert sorted(each.id for each in library_calls.loaded) == sorted(
        each.id for each in (KERNEL, *others)
    )
    compiler.request(KERNEL)
    compiler.wait()
    assert toolchain.runs() == len(library_calls.loaded) == 4


def test_a_kernel_that_failed_is_tried_again(toolchain, library_calls):
    toolchain("no such tile")
    compiler.request(KERNEL)
    with pytest.raises(compiler.CompileError, match="no such tile"):
        compiler.wait()
    assert "no such tile" in library_calls.failed[0]
    toolchain()
    compiler.request(KERNEL)
    compiler.wait()
    assert library_calls.loaded == [KERNEL]


def test_making_an_executable_waits_for_its_kernels():
    """The stage does not depend on the platform: here on the CPU, where no kernel can be loaded."""
    cuda = pytest.importorskip("custom_calls._cuda")
    target = "jaxmoe_test_deep_gemm"
    stages = cuda.deep_gemm_registrations()["jaxmoe_cuda_deep_gemm_bf16"]
    jax.ffi.register_ffi_target(target, stages, platform="cpu")

    def compile_program(kernel: int):
        result = jax.ShapeDtypeStruct((2, 4), jnp.bfloat16)
        x, sizes = jnp.ones((2, 8), jnp.bfloat16), jnp.ones(1, jnp.int32)
        program = jax.jit(lambda x: jax.ffi.ffi_call(target, result)(x, x, sizes, kernel=kernel))
        return program.lower(x).compile()

    with pytest.raises(jax.errors.JaxRuntimeError, match="this process has no DeepGEMM kernel 17"):
        compile_program(17)
    cuda.announce_deep_gemm_kernel(18)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        program = pool.submit(compile_program, 18)
        with pytest.raises(concurrent.futures.TimeoutError):
            program.result(timeout=1)
        cuda.fail_deep_gemm_kernel(18, "no such tile")
        with pytest.raises(jax.errors.JaxRuntimeError, match="no such tile"):
            program.result(timeout=60)


@pytest.mark.parametrize(
    ("num_out", "depth", "dtype", "is_fp8", "message"),
    [
        (64, 136, jnp.bfloat16, True, r"K to be a multiple of 16 in fp8 .* K 136 and N 64"),
        (64, 132, jnp.bfloat16, False, r"K to be a multiple of 8 in bf16 .* K 132 and N 64"),
        (60, 128, jnp.bfloat16, False, "and N of 8, got K 128 and N 60"),
        (64, 128, jnp.float32, True, "multiplies to bfloat16, got float32"),
    ],
)
def test_what_does_not_fit_is_refused(num_out, depth, dtype, is_fp8, message):
    with pytest.raises(ValueError, match=message):
        library.check(num_out, depth, is_fp8=is_fp8, dtype=jnp.dtype(dtype))


def test_layouts_that_do_not_fit_tiles_are_refused():
    weights = jnp.ones((2, 64, 128), jnp.bfloat16)
    sizes, x = jnp.array([3, 4], jnp.int32), jnp.ones((2, 100, 128), jnp.bfloat16)
    options = {"dtype": jnp.dtype(jnp.bfloat16), "expected_rows": None}
    with pytest.raises(ValueError, match="aligned to 64 or 128 rows, got 1"):
        grouped_gemm.contiguous(ContiguousTokens(x[0], sizes, 1), weights, **options)
    with pytest.raises(ValueError, match="multiple of 64, got 100"):
        grouped_gemm.masked(MaskedTokens(x, sizes), weights, **options)


@pytest.mark.parametrize(
    ("sizes", "num_rows", "ends"),
    [
        ([5, 0, 130, 1], 512, [5, 128, 258, 385]),
        ([5, 0, 130, 1], 256, [5, 128, 256, 256]),  # what exceeds the rows ends with them
        ([128, 300, 7], 200, [128, 256, 256]),  # at a whole tile: no end is before its start
        ([-3, 2, 0], 256, [0, 2, 128]),
        ([2**30, 2**30, 2**30], 256, [256, 256, 256]),
    ],
)
def test_contiguous_kernels_are_given_the_ends_of_groups(sizes, num_rows, ends, monkeypatch):
    given = []
    monkeypatch.setattr(library, "num_sms", lambda: NUM_SMS)

    def call(kernel, shape, x, weights, sizes):
        given.append(sizes)
        return jnp.zeros(shape, jnp.bfloat16)

    monkeypatch.setattr(library, "call", call)
    x = jnp.ones((num_rows, 128), jnp.bfloat16)
    tokens = ContiguousTokens(x, jnp.array(sizes, jnp.int32), 128)
    weights = jnp.ones((len(sizes), 64, 128), jnp.bfloat16)
    grouped_gemm.contiguous(tokens, weights, dtype=jnp.dtype(jnp.bfloat16), expected_rows=None)
    assert given[0].tolist() == ends


def test_empty_operands_launch_nothing():
    tokens = MaskedTokens(jnp.zeros((2, 0, 128), jnp.bfloat16), jnp.zeros(2, jnp.int32))
    weights = jnp.ones((2, 64, 128), jnp.bfloat16)
    options = {"dtype": jnp.dtype(jnp.bfloat16), "expected_rows": None}
    assert grouped_gemm.masked(tokens, weights, **options).shape == (2, 0, 64)
