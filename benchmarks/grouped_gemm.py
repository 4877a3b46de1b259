"""Every implementation of `grouped_gemm` and `gemm_fp8` on one GPU, beside what the card can do.

    python benchmarks/grouped_gemm.py --output grouped_gemm.json --deep-gemm-package DIR

Random data with fixed seeds, the same for all. A program calls an op once on each of several sets
of operands, together larger than the L2 cache and enough work to hide starting the program (of
which the host would otherwise set the pace); `us` is the slope of wall time over the number of
such programs in flight, so neither starting nor waiting counts: what a call costs inside a model.
Implementations take turns, and the median of all turns is reported. "package" is the PyTorch API of
sgl-deep-gemm in the same process on the same memory, replayed as a CUDA graph; "package_psum" is
the same with the ends of groups in place of a group for each row, as "deep_gemm" has it.
`--kernel-times` adds what the kernels alone take, without the gaps between them.

The bound of a case is the longer of two times: its products at the rate of an 8192^3 product of the
same type, and the bytes it must move at the rate of a copy of 4 GB, both measured in this run.
Errors are those of up to 16 rows of each group against a float32 product of the same operands.

`ragged_dot` is compiled with other flags in processes of its own. A part that fails is reported
with its error, and the next one runs; results are written after each case.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import report
from custom_calls.gemm import gemm_fp8
from custom_calls.grouped_gemm import grouped_gemm, pallas
from custom_calls.layouts import (
    ContiguousTokens,
    MaskedTokens,
    QuantizedRows,
    QuantizedWeight,
    num_scale_blocks,
    num_scale_rows,
)
from custom_calls.quantize import reference


ALIGNMENT = 128
L2_BYTES = 60e6
MAX_SETS = 48
MAX_SET_BYTES = 12e9
PROGRAM_SECONDS = 6e-4
TYPICAL_FLOPS, TYPICAL_BYTES = 1e15, 4e12
NUM_CHECKED_ROWS = 16
REFERENCE_FLOPS = 2.5e12  # float32 products beyond this take too long to be repeated
XLA_VARIANTS = {
    # cuDNN's grouped product. The flag for grouped GEMM that XLA has besides is for ROCm only, and
    # the Triton lowering that an option of JAX 0.11.2 names is not part of it.
    "ragged_dot_cudnn": {"XLA_FLAGS": "--xla_gpu_experimental_use_ragged_dot_fusion=true"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Groups of `sizes` rows in room for `rows`: of all when contiguous, of each when masked.

    Attributes:
      layout: "contiguous", "masked" or "dense".
      kind: "fp8" or "bf16".
    """

    name: str
    layout: str
    kind: str
    num_out: int
    depth: int
    sizes: tuple[int, ...]
    rows: int

    @property
    def label(self) -> str:
        return f"{self.kind} {self.layout} {self.name}"

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    @property
    def num_owned(self) -> int:
        return sum(self.sizes)

    @property
    def expected_rows(self) -> int:
        return max(1, round(self.num_owned / self.num_groups))

    @property
    def flops(self) -> float:
        return 2.0 * self.num_owned * self.num_out * self.depth

    @property
    def num_bytes(self) -> float:
        """What must move at least: owned rows, weights of groups that have any, results."""
        width = 1 if self.kind == "fp8" else 2
        scales = 4 * num_scale_blocks(self.depth) if self.kind == "fp8" else 0
        filled = sum(size > 0 for size in self.sizes)
        weights = filled * self.num_out * self.depth * width
        return weights + self.num_owned * (self.depth * width + scales + self.num_out * 2)

    @property
    def owned(self) -> np.ndarray:
        """The rows that belong to a group, as positions among all rows, one array a group."""
        starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes)])
        if self.layout == "masked":
            starts = np.arange(self.num_groups) * self.rows
        groups = np.empty(self.num_groups, object)
        for group, size in enumerate(self.sizes):
            groups[group] = starts[group] + np.arange(size)
        return groups


GATE_UP, DOWN = ("gate_up", 4096, 7168), ("down", 7168, 2048)
V3_PROJECTIONS = {
    "q_a": (1536, 7168),
    "q_b": (24576, 1536),
    "kv_a": (576, 7168),
    "o": (7168, 16384),
    "shared_gate_up": (4096, 7168),
    "shared_down": (7168, 2048),
}


def uneven_sizes(num_groups: int, num_rows: int) -> tuple[int, ...]:
    """One group is empty, one takes half, the others share the rest, none at a round number."""
    rng = np.random.default_rng(0)
    others = rng.multinomial(num_rows // 2, np.full(num_groups - 2, 1 / (num_groups - 2)))
    return (0, num_rows // 2, *map(int, others))


def make_cases() -> list[Case]:
    """Those of DeepSeek-V3: experts of one rank, projections of the layer around them."""
    found = []
    for kind in ("fp8", "bf16"):
        for matrix, num_out, depth in (GATE_UP, DOWN):
            is_main = kind == "fp8" or matrix == "gate_up"

            def add(
                name: str,
                layout: str,
                sizes: Sequence[int],
                rows: int,
                *,
                wanted: bool = True,
                fixed: tuple[Any, ...] = (kind, num_out, depth, matrix),
            ) -> None:
                kind, num_out, depth, matrix = fixed
                full = f"{matrix} {len(sizes)}g {name}"
                if wanted:
                    found.append(Case(full, layout, kind, num_out, depth, tuple(sizes), rows))

            for num_rows in (4096, 16384, 65536):
                wanted = is_main or num_rows == 16384
                add(f"{num_rows}", "contiguous", [num_rows // 8] * 8, num_rows, wanted=wanted)
            add("16384", "contiguous", [512] * 32, 16384, wanted=is_main)
            uneven = uneven_sizes(32, 16384)
            room = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in uneven)
            add("16384 uneven", "contiguous", uneven, room, wanted=is_main)
            add("2048 of 16384", "contiguous", [256] * 8, 16384, wanted=is_main)
            for num_groups in (8, 32):
                wanted = kind == "fp8" or (num_groups == 32 and matrix == "gate_up")
                for count in (64, 128):
                    add(f"x{count}", "masked", [count] * num_groups, 128, wanted=wanted)
                decode = [1 + group % 8 for group in range(num_groups)]
                add("x1..8", "masked", decode, 128, wanted=wanted or num_groups == 32)
    for name, (num_out, depth) in V3_PROJECTIONS.items():
        for num_rows in (128, 4096):
            found.append(
                Case(f"{name} {num_rows}", "dense", "fp8", num_out, depth, (num_rows,), num_rows)
            )
    return found


QUICK = (
    "fp8 contiguous gate_up 8g 16384",
    "fp8 contiguous down 32g 16384 uneven",
    "fp8 masked gate_up 32g x64",
    "fp8 masked down 32g x1..8",
    "bf16 contiguous gate_up 8g 16384",
    "bf16 masked gate_up 32g x1..8",
    "fp8 dense o 128",
    "fp8 dense q_a 4096",
)


def tiny(case: Case) -> Case:
    """The same case small enough for a CPU."""
    sizes = tuple(min(size, 3) for size in case.sizes[:3])
    rows = {"contiguous": ALIGNMENT * 3, "masked": 8, "dense": sizes[0]}[case.layout]
    return dataclasses.replace(case, num_out=144, depth=192, sizes=sizes, rows=rows)


@dataclasses.dataclass
class Run:
    """`start(n)` begins n programs of `num_calls` calls, `wait()` returns when all are done.

    Attributes:
      output: what the first call of a program returns.
      row: what is reported of it besides times and errors.
    """

    start: Callable[[int], Any]
    wait: Callable[[], Any]
    num_calls: int
    output: Callable[[], jax.Array]
    row: dict[str, Any] = dataclasses.field(default_factory=dict)
    times: list[float] = dataclasses.field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    cases = [case for case in make_cases() if matches(case, args)]
    if args.package_worker:
        return compile_package(args, cases)
    # The rest is for PyTorch, and for the processes that compile with other flags.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    began = time.monotonic()
    document: dict[str, Any] = {
        "benchmark": "grouped_gemm",
        **report.origin(args.commit),
        "failures": {},
    }
    failures = document["failures"]
    if args.dry_run:
        cases, variants = [tiny(case) for case in cases], []
    elif jax.default_backend() != "gpu":
        sys.exit(f"this benchmark needs a GPU, JAX has {jax.default_backend()!r} (or: --dry-run)")
    else:
        variants = run_variants(args, cases, failures)
    compile_kernels(args, cases, failures)
    package = load_package(args, cases, failures)
    document |= {"machine": machine(), "versions": versions(package)}
    document["ceilings"] = {} if args.no_ceilings else ceilings(args, failures)
    progress(f"ceilings {json.dumps(report.rounded(document['ceilings']))}")

    results: list[dict[str, Any]] = document.setdefault("results", [])
    for index, case in enumerate(cases):
        if time.monotonic() - began > args.budget:
            failures["left out"] = (
                f"after {args.budget} s: {[case.label for case in cases[index:]]}"
            )
            break
        try:
            rows = measure_case(case, package, document["ceilings"], args)
        except Exception as error:
            rows = [{"case": case.label, "implementation": "all", "error": describe(error)}]
        rows += [row for row in variants if row["case"] == case.label]
        add_ratios(rows, case, document["ceilings"])
        results += rows
        for row in rows:
            progress(f"{time.monotonic() - began:4.0f}s {json.dumps(report.rounded(row))}")
        report.write(args.output, report.rounded(document))
    document["seconds"] = time.monotonic() - began
    report.write(args.output, report.rounded(document))
    if args.plot:
        plot(results, args.plot)
    print_table(document)
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write all results as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the fraction of the bound (matplotlib)")
    add("--cases", nargs="*", default=[], metavar="TEXT", help="cases with all of these in them")
    add("--implementations", nargs="+", default=[], metavar="NAME", help="only these")
    add("--repeats", type=int, default=15, metavar="N", help="turns of each (%(default)s)")
    add("--quick", action="store_true", help="eight cases, fewer turns, one Pallas tile")
    add("--budget", type=float, default=330, metavar="S", help="begin no case after (%(default)s)")
    add("--deep-gemm-package", type=Path, metavar="DIR", help="where sgl-deep-gemm is unpacked")
    add("--no-ceilings", action="store_true", help="do not measure the card")
    add("--no-variants", action="store_true", help="no ragged_dot with other flags")
    add("--kernel-times", action="store_true", help="also kernels alone, by PyTorch's profiler")
    add("--commit", metavar="ID", help="where git has none")
    add("--dry-run", action="store_true", help="tiny shapes on any platform: does this run at all?")
    add("--package-worker", metavar="I/N", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def matches(case: Case, args: argparse.Namespace) -> bool:
    chosen = all(text in case.label for text in args.cases)
    return chosen and (not args.quick or case.label in QUICK)


def is_wanted(args: argparse.Namespace, implementation: str) -> bool:
    return not args.implementations or implementation in args.implementations


# Inputs and errors


def make_inputs(case: Case, seed: int) -> tuple[Any, Any]:
    """Tokens (or rows) and weights, random: nothing is zero, and FP8 uses most of its range."""
    keys = jax.random.split(jax.random.key(seed), 4)
    lead = (case.num_groups,) if case.layout != "dense" else ()
    rows = (case.num_groups, case.rows) if case.layout == "masked" else (case.rows,)
    x_shape, w_shape = (*rows, case.depth), (*lead, case.num_out, case.depth)
    sizes = jnp.asarray(case.sizes, jnp.int32)
    blocks = num_scale_blocks(case.depth)
    scale = weights = None
    if case.kind == "fp8":
        x, w = random_fp8(keys[0], x_shape), random_fp8(keys[1], w_shape)
        scale = random_scale(keys[2], (*rows[:-1], blocks, num_scale_rows(rows[-1])))
        w_scale = random_scale(keys[3], (*lead, num_scale_blocks(case.num_out), blocks))
        weights = QuantizedWeight(w, w_scale)
    else:
        x, weights = random_bf16(keys[0], x_shape), random_bf16(keys[1], w_shape)
    if case.layout == "dense":
        return QuantizedRows(x, scale), weights
    if case.layout == "masked":
        return MaskedTokens(x, sizes, scale), weights
    return ContiguousTokens(x, sizes, ALIGNMENT, scale), weights


@functools.partial(jax.jit, static_argnums=1)
def random_bf16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=1)
def random_fp8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    values = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(96)
    return jnp.clip(values, -448, 448).astype(reference.FP8)


@functools.partial(jax.jit, static_argnums=1)
def random_scale(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, 0.5 / 96, 1.5 / 96)


def operation(case: Case, name: str) -> Callable[[Any, Any], jax.Array]:
    """The op by one of its implementations, as a function of `make_inputs`."""
    if case.layout == "dense":
        return lambda rows, weight: gemm_fp8(rows, weight, implementation=name)

    def run(tokens: Any, weights: Any) -> jax.Array:
        expected = case.expected_rows
        return grouped_gemm(tokens, weights, expected_rows=expected, implementation=name).x

    return run


@functools.partial(jax.jit, static_argnums=0)
def errors(case: Case, tokens: Any, weights: Any, y: jax.Array) -> jax.Array:
    """The relative error of sampled rows: the norm of the difference over that of the result."""
    rng = np.random.default_rng(0)
    rows = np.zeros((case.num_groups, NUM_CHECKED_ROWS), np.int32)
    is_checked = np.zeros(rows.shape, bool)
    for group, owned in enumerate(case.owned):
        chosen = rng.permutation(owned)[:NUM_CHECKED_ROWS]
        rows[group, : len(chosen)] = chosen
        is_checked[group, : len(chosen)] = True
    if case.layout == "dense":
        x = reference.dequantize_rows(tokens)
        weights = QuantizedWeight(weights.values[None], weights.scale[None])
    else:
        x = (reference.dequantize_tokens(tokens) if case.kind == "fp8" else tokens).x
    x, y = (array.reshape(-1, array.shape[-1])[rows] for array in (x, y))

    def check(group: tuple[Any, ...]) -> jax.Array:
        x, y, weights, is_checked = group
        w = reference.dequantize_weight(weights) if case.kind == "fp8" else weights
        x, w, y = (array.astype(jnp.float32) for array in (x, w, y))
        right = jnp.matmul(x, w.T, precision=jax.lax.Precision.HIGHEST)
        owned = is_checked[:, None]
        difference, right = jnp.where(owned, y - right, 0.0), jnp.where(owned, right, 0.0)
        return jnp.stack([jnp.sum(difference**2), jnp.sum(right**2)])

    squares = jax.lax.map(check, (x, y, weights, jnp.asarray(is_checked))).sum(0)
    return jnp.sqrt(squares[0] / squares[1])


@functools.partial(jax.jit, static_argnums=0)
def num_different(case: Case, y: jax.Array, other: jax.Array) -> jax.Array:
    """How many numbers of owned rows differ in any bit."""
    owned = np.concatenate([np.zeros(0, np.int32), *case.owned]).astype(np.int32)
    bits = (
        jax.lax.bitcast_convert_type(array.reshape(-1, case.num_out)[owned], jnp.uint16)
        for array in (y, other)
    )
    return jnp.sum(jnp.not_equal(*bits))


# Measuring


def measure_case(
    case: Case, package: Any, ceilings: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    first = make_inputs(case, 0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    num_sets = 2 if args.dry_run else choose_num_sets(case, size)
    sets = [first, *(make_inputs(case, seed) for seed in range(1, num_sets))]
    jax.block_until_ready(sets)

    rows: list[dict[str, Any]] = []
    runs: dict[str, Run] = {}
    outputs: dict[str, jax.Array] = {}
    for name, prepare in preparations(case, package, args):
        row = {"case": case.label, "implementation": name}
        rows.append(row)
        try:
            run = prepare(sets)
            run.row = row | run.row
            run.start(1)
            run.wait()
            outputs[name] = run.output()
            run.row["relative_error"] = float(errors(case, *first, outputs[name]))
            runs[name] = run
            rows[-1] = run.row
        except Exception as error:
            row["error"] = describe(error)
    if "package" in outputs:
        for name, run in runs.items():
            different = num_different(case, outputs[name], outputs["package"])
            run.row["different_from_package"] = int(different)
    outputs.clear()
    take_turns(runs, args)
    for name, run in runs.items():
        add_times(run)
        with contextlib.suppress(Exception):
            run.row |= host_times(case, name, sets, package)
    if args.kernel_times:
        try:
            add_kernel_times(runs)
        except Exception as error:
            rows[0]["kernel_error"] = describe(error)
    return rows


def choose_num_sets(case: Case, num_bytes: int) -> int:
    """As many as the L2 cache does not hold, and work enough to hide starting a program.

    A host starts a program in about 0.1 ms.
    """
    seconds = max(case.flops / TYPICAL_FLOPS, case.num_bytes / TYPICAL_BYTES)
    wanted = max(2, 4 * L2_BYTES / num_bytes, PROGRAM_SECONDS / seconds)
    return math.ceil(min(wanted, MAX_SETS, max(2, MAX_SET_BYTES / num_bytes)))


def preparations(
    case: Case, package: Any, args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[list[Any]], Run]]]:
    names = ["deep_gemm", "package", "package_psum", "pallas", "ragged_dot", "reference"]
    if args.dry_run:
        names += ["cpu"]
    for name in names:
        if not is_wanted(args, name):
            continue
        if name.startswith("package"):
            if package is not None and (name == "package" or case.layout == "contiguous"):
                is_psum = name == "package_psum"
                yield name, functools.partial(prepare_package, case, package, is_psum=is_psum)
        elif name in ("pallas", "ragged_dot") and case.kind != "bf16":
            continue
        elif name == "pallas" and not args.dry_run:
            yield name, functools.partial(tune_pallas, case, args=args)
        elif name == "reference" and case.flops * case.num_groups > REFERENCE_FLOPS:
            continue
        else:
            yield name, functools.partial(prepare_jax, operation(case, name))


def prepare_jax(op: Callable[[Any, Any], jax.Array], sets: list[Any]) -> Run:
    program = jax.jit(lambda sets: [op(*each) for each in sets])
    last: list[Any] = [None]

    def start(times: int) -> None:
        for _ in range(times):
            last[0] = program(sets)

    def wait() -> None:
        jax.block_until_ready(last[0])

    return Run(start, wait, len(sets), lambda: last[0][0])


def tune_pallas(case: Case, sets: list[Any], *, args: argparse.Namespace) -> Run:
    """The fastest of the tiles, or the default one alone when in a hurry."""
    if (reason := pallas.missing()) is not None:
        raise RuntimeError(reason)
    function = pallas.masked if case.layout == "masked" else pallas.contiguous
    tiles = [None] if args.quick else list(pallas.configurations(case.num_out, case.depth))
    found: dict[str, Run] = {}
    failed: dict[str, str] = {}
    for tile in tiles:
        op = functools.partial(
            function,
            dtype=jnp.dtype(jnp.bfloat16),
            expected_rows=case.expected_rows,
            configuration=tile,
        )
        name = "default" if tile is None else str(tuple(dataclasses.asdict(tile).values()))
        try:
            found[name] = prepare_jax(op, sets)
            found[name].start(1)
            found[name].wait()
        except Exception as error:
            found.pop(name, None)
            failed[name] = describe(error)
    if not found:
        raise RuntimeError(f"no tile works: {failed}")
    if len(found) > 1:
        take_turns(found, args, repeats=3)
    tried = {name: statistics.median(run.times) * 1e6 for name, run in found.items() if run.times}
    best = min(tried, key=tried.__getitem__) if tried else next(iter(found))
    run = dataclasses.replace(found[best], times=[])
    run.row = {"tile": best, "tiles_us": tried} | ({"tiles_failed": failed} if failed else {})
    return run


def take_turns(runs: dict[str, Run], args: argparse.Namespace, repeats: int | None = None) -> None:
    """Fills `times` with seconds a call: of some programs less those of half as many."""
    goal = 0.002 if args.dry_run else 0.012
    num_turns: int = repeats or (5 if args.quick else args.repeats)
    plans = {}
    for name, run in runs.items():
        run.start(1)
        run.wait()
        took = timed(run, 1)
        more = max(2, 2 * round(goal / max(took, 1e-6) / 2))
        plans[name] = (more // 2, more, min(num_turns, 3) if took > 0.1 else num_turns)
    for turn in range(num_turns):
        for name, run in runs.items():
            few, many, turns = plans[name]
            if turn < turns:
                run.times.append(difference(run, few, many) / run.num_calls)


def difference(run: Run, few: int, many: int, tries: int = 10) -> float:
    """Seconds a start, by which `many` take longer than `few`; again where others' work made `few`
    take longer."""
    for _ in range(tries):
        seconds = (timed(run, many) - timed(run, few)) / (many - few)
        if seconds > 0:
            return seconds
    raise RuntimeError(f"{many} calls took no longer than {few}, {tries} times: is all idle?")


def timed(run: Run, times: int) -> float:
    began = time.perf_counter()
    run.start(times)
    run.wait()
    return time.perf_counter() - began


def add_times(run: Run) -> None:
    quartiles = np.percentile(run.times, [25, 50, 75]) * 1e6
    run.row |= {
        "us": float(quartiles[1]),
        "us_quartiles": [float(quartiles[0]), float(quartiles[2])],
        "sets": run.num_calls,
    }


def host_times(case: Case, name: str, sets: list[Any], package: Any) -> dict[str, float]:
    """Host microseconds until a call returns; of "deep_gemm" also those inside its handler."""
    if name == "package":
        run = prepare_package(case, package, sets[:1], is_psum=False, as_graph=False)
    elif name == "deep_gemm":
        run = prepare_jax(operation(case, name), sets[:1])
    else:
        return {}
    counters = getattr(importlib.import_module("custom_calls"), "deep_gemm", None)
    run.start(3)
    run.wait()
    num_calls, samples = 20, []
    handler, launches = [], 0
    for _ in range(5):
        before = handler_counters(counters)
        began = time.perf_counter()
        run.start(num_calls)
        samples.append((time.perf_counter() - began) / num_calls)
        run.wait()
        after = handler_counters(counters)
        if after[0] > before[0]:
            handler.append((after[1] - before[1]) / (after[0] - before[0]) / 1e3)
            launches += after[0] - before[0]
    found = {"dispatch_us": statistics.median(samples) * 1e6}
    if name == "deep_gemm" and handler:
        found["handler_us"] = statistics.median(handler)
        found["launches_a_call"] = launches / (5 * num_calls)
    return found


def handler_counters(counters: Any) -> tuple[int, int]:
    try:
        launches = counters.launches()
        return sum(n for name, n in launches.items() if name != "captured"), (
            counters.host_nanoseconds()
        )
    except (AttributeError, ImportError):
        return 0, 0


def add_kernel_times(runs: dict[str, Run], turns: int = 5) -> None:
    """Microseconds that a call's kernels run. PyTorch's profiler sees JAX's kernels, too."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run.start(1)
                run.wait()
            kernels = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA]
            total = sum(event.time_range.elapsed_us() for event in kernels)
            times[name].append(total / run.num_calls)
            run.row["kernels_a_call"] = len(kernels) / run.num_calls
    for name, run in runs.items():
        run.row["kernel_us"] = statistics.median(times[name])


def add_ratios(rows: list[dict[str, Any]], case: Case, ceilings: dict[str, Any]) -> None:
    rate, copy = ceilings.get(f"{case.kind}_flops"), ceilings.get("copy_bytes")
    compute = case.flops / rate * 1e6 if rate else 0.0
    memory = case.num_bytes / copy * 1e6 if copy else 0.0
    times = {row["implementation"]: row["us"] for row in rows if row.get("us", 0) > 0}
    for row in rows:
        if row["implementation"] not in times:
            continue
        us = times[row["implementation"]]
        row["tflops"] = case.flops / us / 1e6
        row["gb_per_s"] = case.num_bytes / us / 1e3
        if compute and memory:
            row |= {
                "limit": "compute" if compute > memory else "memory",
                "bound_us": max(compute, memory),
                "of_bound": max(compute, memory) / us,
            }
        if "package" in times:
            row["package_over_this"] = times["package"] / us
    kernels = {row["implementation"]: row["kernel_us"] for row in rows if row.get("kernel_us")}
    for row in rows:
        if "package" in kernels and row["implementation"] in kernels:
            row["package_kernel_over_this"] = kernels["package"] / kernels[row["implementation"]]


# What the card can do


def ceilings(args: argparse.Namespace, failures: dict[str, str]) -> dict[str, Any]:
    """The best rates of a copy and of 8192^3 products, and all that were tried."""
    size = 256 if args.dry_run else 8192
    num_copied = 1 << 20 if args.dry_run else 4_000_000_000
    a = random_bf16(jax.random.key(0), (size, size))
    b = random_bf16(jax.random.key(1), (size, size))
    big = jnp.arange(num_copied // 4, dtype=jnp.int32)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        contract = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.bfloat16)

    fp8 = [random_fp8(jax.random.key(seed), (size, size)) for seed in (2, 3)]
    plans: dict[str, Callable[[], Run]] = {
        "copy jax": lambda: prepare_jax(lambda x, _: ~x, [(big, 0)]),
        "bf16 jax": lambda: prepare_jax(product, [(a, b)]),
        "fp8 jax": lambda: prepare_jax(product, [tuple(fp8)]),
    }
    if not args.dry_run:
        plans |= torch_ceilings(big, a, b, fp8)
    work = {"copy": 2.0 * big.nbytes, "bf16": 2.0 * size**3, "fp8": 2.0 * size**3}
    rates: dict[str, dict[str, float]] = {"copy": {}, "bf16": {}, "fp8": {}}
    for name, prepare in plans.items():
        kind, by = name.split(" ", 1)
        try:
            run = prepare()
            take_turns({name: run}, args, repeats=7)
            rates[kind][by] = work[kind] / statistics.median(run.times)
        except Exception as error:
            failures[f"ceiling {name}"] = describe(error)
    found: dict[str, Any] = {"tried": rates}
    for kind, key in (("copy", "copy_bytes"), ("bf16", "bf16_flops"), ("fp8", "fp8_flops")):
        found[key] = max(rates[kind].values(), default=None)
    return found


def torch_ceilings(
    big: jax.Array, a: jax.Array, b: jax.Array, fp8: list[jax.Array]
) -> dict[str, Callable[[], Run]]:
    def torch_run(make: Callable[[Any], Callable[[], Any]]) -> Callable[[], Run]:
        def prepare() -> Run:
            import torch

            call = make(torch)

            def start(times: int) -> None:
                for _ in range(times):
                    call()

            return Run(start, torch.cuda.synchronize, 1, lambda: a)

        return prepare

    def copy(torch: Any) -> Callable[[], Any]:
        source = to_torch(big)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def bf16(torch: Any) -> Callable[[], Any]:
        x, y = to_torch(a), to_torch(b)
        out = torch.empty_like(x)
        return lambda: torch.matmul(x, y.T, out=out)

    def scaled(by_row: bool, fast: bool) -> Callable[[Any], Callable[[], Any]]:
        def make(torch: Any) -> Callable[[], Any]:
            x, y = (to_torch(each) for each in fp8)
            shapes = ((len(x), 1), (1, len(y))) if by_row else ((), ())
            scales = [torch.ones(shape, device="cuda") for shape in shapes]
            return lambda: torch._scaled_mm(
                x, y.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return make

    plans = {"copy torch": torch_run(copy), "bf16 torch": torch_run(bf16)}
    for by_row in (False, True):
        for fast in (False, True):
            name = f"fp8 torch {'row' if by_row else 'tensor'}wise{' fast' * fast}"
            plans[name] = torch_run(scaled(by_row, fast))
    return plans


# The package's own API


def compile_kernels(args: argparse.Namespace, cases: list[Case], failures: dict[str, str]) -> None:
    """Compiles all kernels of "deep_gemm" side by side; one that fails fails again in its case."""
    if not is_wanted(args, "deep_gemm"):
        return
    try:
        from custom_calls import deep_gemm

        if (reason := deep_gemm.missing()) is not None:
            raise RuntimeError(reason)
        for case in cases:
            shapes = jax.eval_shape(functools.partial(make_inputs, case, 0))
            jax.eval_shape(operation(case, "deep_gemm"), *shapes)
        deep_gemm.wait(progress=True)
    except Exception as error:
        failures["deep_gemm"] = describe(error)


def load_package(args: argparse.Namespace, cases: list[Case], failures: dict[str, str]) -> Any:
    """The module deep_gemm of `--deep-gemm-package` with its kernels compiled, or None."""
    if not is_wanted(args, "package") and not is_wanted(args, "package_psum"):
        return None
    if args.deep_gemm_package is None or args.dry_run:
        failures["package"] = "left out: no --deep-gemm-package"
        return None
    try:
        package = import_package(args.deep_gemm_package)
    except Exception as error:
        failures["package"] = describe(error)
        return None
    # It compiles a kernel when it is first called, one after the other: here side by side.
    num_workers = min(len(cases), max(1, (os.cpu_count() or 1) // 2), 12)
    command = [sys.executable, __file__, "--deep-gemm-package", str(args.deep_gemm_package)]
    command += ["--quick"] * args.quick + (["--cases", *args.cases] if args.cases else [])
    progress(f"compiling the package's kernels in {num_workers} processes")
    workers = [
        subprocess.Popen([*command, "--package-worker", f"{index}/{num_workers}"])
        for index in range(num_workers)
    ]
    for worker in workers:
        try:
            worker.wait(180)
        except subprocess.TimeoutExpired:
            worker.kill()
            failures["package worker"] = "took more than 180 s"
    return package


def import_package(directory: Path) -> Any:
    """`deep_gemm` from there; afterwards other modules are looked up there last."""
    if not (directory / "deep_gemm").is_dir():
        raise RuntimeError(f"there is no deep_gemm in {directory}")
    path = str(directory.resolve())
    sys.path.insert(0, path)
    try:
        return importlib.import_module("deep_gemm")
    finally:
        sys.path.remove(path)
        sys.path.append(path)


def compile_package(args: argparse.Namespace, cases: list[Case]) -> int:
    """One of several processes that fill the package's cache of compiled kernels."""
    import torch

    package = import_package(args.deep_gemm_package)
    index, num_workers = map(int, args.package_worker.split("/"))
    for case in cases[index::num_workers]:
        rows = (case.num_groups, case.rows) if case.layout == "masked" else (case.rows,)
        lead = () if case.layout == "dense" else (case.num_groups,)
        blocks = num_scale_blocks(case.depth)
        dtype = torch.float8_e4m3fn if case.kind == "fp8" else torch.bfloat16

        def empty(*shape: int, dtype: Any = torch.float32) -> Any:
            return torch.empty(shape, dtype=dtype, device="cuda")

        operands = Operands(
            empty(*rows, case.depth, dtype=dtype),
            empty(*rows[:-1], blocks, num_scale_rows(rows[-1])),
            empty(*lead, case.num_out, case.depth, dtype=dtype),
            empty(*lead, num_scale_blocks(case.num_out), blocks),
        )
        for is_psum in (False, True)[: 2 if case.layout == "contiguous" else 1]:
            try:
                package_call(case, package, operands, is_psum=is_psum)()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{case.label}: {describe(error)}", file=sys.stderr)
    return 0


@dataclasses.dataclass(frozen=True)
class Operands:
    """Tensors; scales as JAX stores them, and not read when there is no FP8."""

    x: Any
    x_scale: Any
    weights: Any
    weight_scale: Any


def package_call(
    case: Case, package: Any, operands: Operands, *, is_psum: bool
) -> Callable[[], Any]:
    """A call of the package's API, with its result, `call.output`, allocated before."""
    import torch

    out = torch.empty(
        (*operands.x.shape[:-1], case.num_out), dtype=torch.bfloat16, device=operands.x.device
    )
    if case.kind == "fp8":
        # Rows by blocks, rows next to each other in memory: what the kernel reads, no copy.
        scale = operands.x_scale.transpose(-1, -2)[..., : operands.x.shape[-2], :]
        a, b = (operands.x, scale), (operands.weights, operands.weight_scale)
    else:
        a, b = operands.x, operands.weights
    fp8 = "fp8" if case.kind == "fp8" else "bf16"
    if case.layout == "dense":
        call = functools.partial(package.fp8_gemm_nt, a, b, out)
    elif case.layout == "masked":
        counts = torch.tensor(case.sizes, dtype=torch.int32, device=out.device)
        function = getattr(package, f"{fp8}_m_grouped_gemm_nt_masked")
        call = functools.partial(function, a, b, out, counts, case.expected_rows)
    else:
        layout = psum_layout(case) if is_psum else row_layout(case)
        call = functools.partial(
            getattr(package, f"m_grouped_{fp8}_gemm_nt_contiguous"),
            *(a, b, out, torch.from_numpy(layout).to(out.device)),
            **({"use_psum_layout": True, "ensure_zero_padding": False} if is_psum else {}),
        )
    call.output = out  # type: ignore[attr-defined]
    return call


def row_layout(case: Case) -> np.ndarray:
    """The group of each row, padding counted to the group before it, -1 for rows past the last."""
    group_of = np.full(case.rows, -1, np.int32)
    for group, owned in enumerate(case.owned):
        if len(owned):
            group_of[owned[0] : owned[0] + -(-len(owned) // ALIGNMENT) * ALIGNMENT] = group
    return group_of


def psum_layout(case: Case) -> np.ndarray:
    """The end of each group; a group starts at the next multiple of the alignment."""
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in case.sizes]
    starts = np.cumsum([0, *padded[:-1]])
    return (starts + np.array(case.sizes)).astype(np.int32)


def prepare_package(
    case: Case, package: Any, sets: list[Any], *, is_psum: bool, as_graph: bool = True
) -> Run:
    import torch

    calls = []
    for tokens, weights in sets:
        x = tokens.values if case.layout == "dense" else tokens.x
        is_fp8 = case.kind == "fp8"
        operands = Operands(
            to_torch(x),
            to_torch(tokens.scale) if is_fp8 else None,
            to_torch(weights.values if is_fp8 else weights),
            to_torch(weights.scale) if is_fp8 else None,
        )
        calls.append(package_call(case, package, operands, is_psum=is_psum))
    for call in calls:
        call()
    torch.cuda.synchronize()

    def one() -> None:
        for call in calls:
            call()

    row: dict[str, Any] = {"as_graph": False}
    if as_graph:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one()
            one, row = graph.replay, {"as_graph": True}
        except Exception as error:
            row["graph_error"] = describe(error)

    def start(times: int) -> None:
        for _ in range(times):
            one()

    return Run(
        start, torch.cuda.synchronize, len(calls), lambda: jnp.from_dlpack(calls[0].output), row
    )


def to_torch(array: jax.Array) -> Any:
    """The same memory as a tensor; FP8 by way of bytes, and of a copy."""
    import torch

    jax.block_until_ready(array)
    if array.dtype == reference.FP8:
        as_bytes = jax.block_until_ready(jax.lax.bitcast_convert_type(array, jnp.uint8))
        return torch.from_dlpack(as_bytes).view(torch.float8_e4m3fn)
    return torch.from_dlpack(array)


# ragged_dot under other flags


def run_variants(
    args: argparse.Namespace, cases: list[Case], failures: dict[str, str]
) -> list[dict[str, Any]]:
    """`ragged_dot` of the contiguous bf16 cases, measured by this program under other flags."""
    wanted = [case for case in cases if case.kind == "bf16" and case.layout == "contiguous"]
    rows: list[dict[str, Any]] = []
    if args.no_variants or not wanted or not is_wanted(args, "ragged_dot"):
        return rows
    for name, environment in XLA_VARIANTS.items():
        progress(f"{name}: {environment}")
        flags = f"{os.environ.get('XLA_FLAGS', '')} {environment.get('XLA_FLAGS', '')}".strip()
        child = os.environ | environment | {"XLA_FLAGS": flags}
        child["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.3"
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "result.json"
            command = [sys.executable, __file__, "--implementations", "ragged_dot", "--no-ceilings"]
            command += ["--no-variants", "--repeats", "5", "--budget", "60"]
            command += ["--output", str(output)] + ["--quick"] * args.quick
            command += ["--cases", *args.cases, "bf16", "contiguous"]
            try:
                done = subprocess.run(
                    command, env=child, timeout=120, capture_output=True, text=True
                )
                if done.returncode:
                    failures[name] = done.stderr[-2000:]
                found = json.loads(output.read_text(encoding="utf-8"))["results"]
                rows += [row | {"implementation": name, "flags": environment} for row in found]
            except Exception as error:
                failures[name] = describe(error)
    return rows


# Reporting


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_table(document: dict[str, Any]) -> None:
    """A line for each case: microseconds, and the percentage of the bound."""
    rows_of: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["results"]:
        rows_of.setdefault(row["case"], {})[row["implementation"]] = row
    print(f"\n{'us (% of bound)':39}{'bound':>7}{'deep_gemm':>15}{'package':>15}", end="")
    print(f"{'ratio':>6}{'kernel':>7}{'differ':>8}{'error':>9}  others")
    for case, rows in rows_of.items():
        ours, theirs = rows.get("deep_gemm", {}), rows.get("package", {})
        bound = next((row["bound_us"] for row in rows.values() if "bound_us" in row), math.nan)
        ratio, different = ours.get("package_over_this"), ours.get("different_from_package")
        kernel = ours.get("package_kernel_over_this")
        error = ours.get("relative_error")
        others = [
            f"{name} {cell(row)}"
            for name, row in rows.items()
            if name not in ("deep_gemm", "package")
        ]
        print(
            f"{case:39}{bound:7.1f}{cell(ours):>15}{cell(theirs):>15}"
            f"{'-' if ratio is None else f'{ratio:.2f}':>6}"
            f"{'-' if kernel is None else f'{kernel:.2f}':>7}"
            f"{'-' if different is None else different:>8}"
            f"{'-' if error is None else f'{error:.1e}':>9}  {', '.join(others)}"
        )
    failures = dict(document["failures"])
    for row in document["results"]:
        if "error" in row:
            failures.setdefault(row["implementation"], row["error"])
    for name, text in failures.items():
        print(f"{name}: {text.splitlines()[0] if text else 'failed'}"[:200])
    found = document["ceilings"]
    for key, unit in (("copy_bytes", 1e9), ("bf16_flops", 1e12), ("fp8_flops", 1e12)):
        if found.get(key):
            print(f"{key}: {found[key] / unit:.0f} {'GB/s' if unit == 1e9 else 'TFLOP/s'}")


def cell(row: dict[str, Any]) -> str:
    if "us" not in row:
        return "failed" if "error" in row else "-"
    share = f" ({row['of_bound']:.0%})" if "of_bound" in row else ""
    return f"{row['us']:.1f}{share}"


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of the fraction of the bound, a group of them for each case."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    measured = [row for row in results if "of_bound" in row]
    cases = list(dict.fromkeys(row["case"] for row in measured))
    names = list(dict.fromkeys(row["implementation"] for row in measured))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.35 * len(cases)))
    height = 0.85 / max(1, len(names))
    for index, name in enumerate(names):
        of_bound = {
            row["case"]: row["of_bound"] for row in measured if row["implementation"] == name
        }
        places = [cases.index(case) + index * height for case in of_bound]
        axes.barh(places, [100 * value for value in of_bound.values()], height, label=name)
    axes.set_yticks([place + 0.4 for place in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the bound (matrix rate or copy rate of this card)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count()}
    query = "driver_version,clocks.max.sm,power.limit"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        printed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        found |= dict(zip(query.split(","), printed.split(", "), strict=False))
    return found


def versions(package: Any) -> dict[str, str]:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", "sgl-deep-gemm")
    found = report.versions(*names)
    if package is not None:
        found["package"] = getattr(package, "__version__", "unknown")
    return found


if __name__ == "__main__":
    sys.exit(main())
