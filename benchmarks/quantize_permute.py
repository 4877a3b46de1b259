"""Triton kernels of `quantize` and `permute` against plain JAX on one GPU, beside a device copy.

Each case runs on several inputs in one program, more than the L2 cache holds where the case is
large enough (`cold`), program after program without waiting: `us` is the time between results,
`device_us` what the profiler counts as kernels. Bytes are those an op must read and write, and
`of_copy` is their rate over that of a copy of 2 GB. Results are compared first; a case that fails
is printed with its error, and the next one runs.

    python benchmarks/quantize_permute.py --output quantize_permute.json
    python benchmarks/quantize_permute.py --sweep   # other tile sizes, for another GPU
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import report
from custom_calls import permute, quantize
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.quantize import reference


L2_BYTES = 60e6
TOP_K = 8
ALIGNMENT = 128
EXPERT_WIDTH = 2048
NUM_CHECKED_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Case:
    """`run(implementation, input)`, `make(rng)` of an input, what must move, and what is wrong."""

    name: str
    run: Callable[[str, Any], Any]
    make: Callable[[np.random.Generator], Any]
    num_bytes: Callable[[Any], float]
    check: Callable[[Any, Any], str | None]


def main() -> int:
    args = parse_arguments()
    copy = copy_bandwidth(args)
    print(json.dumps(report.rounded({"case": "copy", "gb_per_s": copy / 1e9})), flush=True)
    results = list(sweep(args, copy) if args.sweep else compare(args, copy))
    document = {
        "benchmark": "quantize_permute",
        "copy_gb_per_s": copy / 1e9,
        "results": results,
        "device": jax.devices()[0].device_kind,
        "versions": report.versions("jax", "jax-triton", "triton"),
        **report.origin(),
    }
    report.write(args.output, report.rounded(document))
    print_table(results, copy)
    return int(any("error" in result for result in results))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[4096, 128], metavar="T", help="(%(default)s)")
    add("--hidden", type=int, default=7168, metavar="H", help="(%(default)s)")
    add("--repeats", type=int, default=7, metavar="N", help="(%(default)s)")
    add("--copy-bytes", type=float, default=2e9, metavar="N", help="(%(default)s)")
    add("--implementation", nargs="+", default=["reference", "triton"], help="(%(default)s)")
    add("--only", default="", metavar="TEXT", help="the cases with this in their names")
    add("--sweep", action="store_true", help="time tile sizes of the Triton kernels instead")
    add("--output", type=Path, metavar="FILE", help="write all results as JSON")
    return parser.parse_args()


def compare(args: argparse.Namespace, copy: float) -> Iterator[dict[str, Any]]:
    for num_tokens in args.tokens:
        for case in cases(num_tokens, args.hidden):
            for implementation in args.implementation if args.only in case.name else ():
                row = {"case": case.name, "implementation": implementation}
                yield measured(row, case, args, copy)


def sweep(args: argparse.Namespace, copy: float) -> Iterator[dict[str, Any]]:
    found = {case.name: case for case in cases(args.tokens[0], args.hidden)}
    quantize_names = [name for name in found if "quantize" in name]
    copy_names = [name for name in found if name not in quantize_names]
    plans = (
        ("quantize", quantize_names, {"TILE_ROWS": (4, 8, 16), "TILE_BLOCKS": (2, 4, 8)}),
        ("quantize", quantize_names, {"NUM_WARPS": (2, 8)}),
        ("quantize", quantize_names[1:], {"MAX_PROGRAMS": (132 * 4, 132 * 7, 132 * 64)}),
        ("permute", copy_names, {"PART_BYTES": (1024, 2048, 4096, 8192), "COPY_WARPS": (4, 8)}),
        ("permute", copy_names[:3], {"MAX_BLOCKS": (64, 256), "INDEX_WARPS": (4, 8, 16)}),
    )
    for op, names, choices in plans:
        module = importlib.import_module(f"custom_calls.{op}.triton")
        before = {name: getattr(module, name) for name in choices}
        for values in itertools.product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            for name, value in chosen.items():
                setattr(module, name, value)
            for name in names:
                if args.only in name:
                    row = {"case": name, "implementation": "triton", "constants": chosen}
                    yield measured(row, found[name], args, copy)
        for name, value in before.items():
            setattr(module, name, value)


def measured(
    row: dict[str, Any], case: Case, args: argparse.Namespace, copy: float
) -> dict[str, Any]:
    try:
        row |= measure(case, row["implementation"], args.repeats, copy)
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(report.rounded(row)), flush=True)
    return row


def measure(case: Case, implementation: str, repeats: int, copy: float) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    inputs = [case.make(rng)]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(inputs))
    inputs += [case.make(rng) for _ in range(min(16, max(2, round(8 * L2_BYTES / size))) - 1)]
    run = functools.partial(case.run, implementation)
    wrong = case.check(jax.jit(run)(inputs[0]), inputs[0])
    program = jax.jit(lambda inputs: [run(each) for each in inputs]).lower(inputs).compile()
    jax.block_until_ready(program(inputs))

    num_programs = 10
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(num_programs - 1):
            program(inputs)
        jax.block_until_ready(program(inputs))
        seconds.append((time.perf_counter() - began) / num_programs / len(inputs))
    num_bytes = statistics.mean(map(case.num_bytes, inputs))
    on_device = device_seconds(lambda: program(inputs))
    best = statistics.median(seconds) if on_device is None else on_device / len(inputs)
    return {
        "us": statistics.median(seconds) * 1e6,
        "us_min": min(seconds) * 1e6,
        "us_max": max(seconds) * 1e6,
        "device_us": None if on_device is None else on_device / len(inputs) * 1e6,
        "mb": num_bytes / 1e6,
        "gb_per_s": num_bytes / best / 1e9,
        "of_copy": num_bytes / best / copy,
        "cold": size * len(inputs) > 2 * L2_BYTES,
        "equal": wrong is None,
        "wrong": wrong,
    }


def device_seconds(run: Callable[[], Any], times: int = 5) -> float | None:
    """The time in kernels and copies of one run; None where the profiler sees no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times - 1):
                run()
            jax.block_until_ready(run())
        nanoseconds = 0
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    if line.name.startswith("Stream"):
                        nanoseconds += sum(event.duration_ns for event in line.events)
    return nanoseconds / times / 1e9 or None


def copy_bandwidth(args: argparse.Namespace) -> float:
    """Bytes read and written a second by the faster of a copy and a kernel that negates."""
    x = jnp.ones(int(args.copy_bytes) // 4, jnp.float32)
    best = float("inf")
    for function in (jnp.copy, jnp.negative):
        run = jax.jit(function).lower(x).compile()
        jax.block_until_ready(run(x))
        for _ in range(args.repeats):
            began = time.perf_counter()
            for _ in range(4):
                run(x)
            jax.block_until_ready(run(x))
            best = min(best, (time.perf_counter() - began) / 5)
    return 2 * x.nbytes / best


def cases(num_tokens: int, hidden: int) -> list[Case]:
    num_copies = num_tokens * TOP_K
    size = f"{num_tokens}x{hidden}"
    gate = f"{num_tokens}x{TOP_K}x{EXPERT_WIDTH}"
    capacity = max(16, num_copies // 16)
    found = [
        Case(
            f"quantize_rows {size}",
            lambda name, x: quantize.quantize_rows(x, implementation=name),
            lambda rng: normal(rng, (num_tokens, hidden)),
            lambda x: x.size * 3 + x.size / 32,
            lambda rows, x: check_quantized(rows.values, rows.scale.T, x),
        ),
        quantize_case(f"quantize contiguous {size}", hidden, num_tokens, num_copies, 1),
        quantize_case(f"quantize masked {size}", hidden, num_tokens, None, 1, capacity // 2),
        quantize_case(f"silu_quantize contiguous {gate}", EXPERT_WIDTH, num_copies, num_copies, 2),
        quantize_case(f"silu_quantize masked {gate}", EXPERT_WIDTH, num_copies, None, 2, capacity),
    ]
    for num_groups in (32, 256):
        bound = num_copies + num_groups * (ALIGNMENT - 1)
        found.append(
            permute_case(
                f"permute_contiguous {size} {num_groups} groups",
                num_tokens,
                hidden,
                num_groups,
                functools.partial(
                    permute.permute_contiguous,
                    num_groups=num_groups,
                    max_rows=bound,
                    alignment=ALIGNMENT,
                ),
            )
        )
    masked = functools.partial(permute.permute_masked, num_groups=32, capacity=capacity)
    found.append(permute_case(f"permute_masked {size} 32 groups", num_tokens, hidden, 32, masked))

    def make_rows(rng: np.random.Generator) -> tuple[Any, ...]:
        row_of = rng.permutation(num_copies).reshape(num_tokens, TOP_K)
        weights = jnp.asarray(rng.random((num_tokens, TOP_K), np.float32))
        return normal(rng, (num_copies, hidden)), jnp.asarray(row_of, jnp.int32), weights

    found.append(
        Case(
            f"unpermute {size} top-{TOP_K}",
            lambda name, given: permute.unpermute(*given, implementation=name),
            make_rows,
            lambda given: (num_copies + num_tokens) * hidden * 2,
            check_unpermuted,
        )
    )
    return found


def quantize_case(
    name: str, depth: int, num_rows: int, bound: int | None, parts: int, capacity: int = 0
) -> Case:
    """`num_rows` rows in 32 groups: in a masked layout without bound."""
    num_groups = 32
    op = quantize.quantize if parts == 1 else quantize.silu_and_mul_quantize

    def make(rng: np.random.Generator) -> ContiguousTokens | MaskedTokens:
        sizes = rng.multinomial(num_rows, np.full(num_groups, 1 / num_groups)).astype(np.int32)
        if bound is None:
            x = normal(rng, (num_groups, capacity, parts * depth))
            return MaskedTokens(x, jnp.minimum(jnp.asarray(sizes), capacity))
        x = normal(rng, (bound + num_groups * ALIGNMENT, parts * depth))
        return ContiguousTokens(x, jnp.asarray(sizes), ALIGNMENT)

    def check(
        quantized: ContiguousTokens | MaskedTokens, tokens: ContiguousTokens | MaskedTokens
    ) -> str | None:
        if isinstance(quantized, MaskedTokens):
            group = np.argmax(quantized.counts)
            rows = slice(0, int(quantized.counts[group]))
            values, scale, x = (each[group] for each in (quantized.x, quantized.scale, tokens.x))
        else:
            group = np.argmax(quantized.group_sizes)
            start = int(quantized.group_starts[group])
            rows = slice(start, start + int(quantized.group_sizes[group]))
            values, scale, x = quantized.x, quantized.scale, tokens.x
        return check_quantized(values[rows], scale[:, rows].T, x[rows], is_gated=parts == 2)

    return Case(
        name,
        lambda implementation, tokens: op(tokens, implementation=implementation),
        make,
        lambda _: num_rows * depth * (2 * parts + 1 + 1 / 32),
        check,
    )


def permute_case(
    name: str, num_tokens: int, hidden: int, num_groups: int, op: Callable[..., Any]
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Any, ...]:
        group_idx = np.argsort(rng.random((num_tokens, num_groups)), axis=1)[:, :TOP_K]
        return normal(rng, (num_tokens, hidden)), jnp.asarray(group_idx, jnp.int32)

    def check(permuted: tuple[Any, Any], given: tuple[Any, Any]) -> str | None:
        tokens, row_of = permuted
        expected, expected_row_of = op(*given, implementation="reference")
        sizes = [
            each.counts if isinstance(each, MaskedTokens) else each.group_sizes
            for each in (tokens, expected)
        ]
        if not np.array_equal(row_of, expected_row_of) or not np.array_equal(*sizes):
            return "rows or sizes differ from the reference"
        rows = tokens.x.reshape(-1, hidden)[jnp.maximum(row_of, 0)]
        is_equal = (rows == given[0][:, None, :]) | (row_of < 0)[:, :, None]
        return None if bool(is_equal.all()) else "rows are not the tokens"

    return Case(
        name,
        lambda implementation, given: op(*given, implementation=implementation),
        make,
        lambda _: num_tokens * (1 + TOP_K) * hidden * 2,
        check,
    )


def check_quantized(values: Any, scale: Any, x: Any, *, is_gated: bool = False) -> str | None:
    """Against the reference on CPU, whose divisions are exact: some of XLA's for GPUs are not."""
    values, scale = np.asarray(values)[:NUM_CHECKED_ROWS], np.asarray(scale)[:NUM_CHECKED_ROWS]
    x = np.asarray(x[:NUM_CHECKED_ROWS])
    with jax.default_device(jax.devices("cpu")[0]):
        tokens = ContiguousTokens(jnp.asarray(x), jnp.asarray([len(x)], jnp.int32))
        op = reference.silu_and_mul_quantize if is_gated else reference.quantize
        expected = jax.jit(op)(tokens)
    bits = values.view(np.uint8) != np.asarray(expected.x).view(np.uint8)
    scales = scale[: len(x)] != np.asarray(expected.scale).T[: len(x)]
    if not bits.any() and not scales.any():
        return None
    return f"{bits.sum()} of {bits.size} values and {scales.sum()} of {scales.size} scales differ"


def check_unpermuted(y: Any, given: tuple[Any, ...]) -> str | None:
    rows = np.asarray(given[0])
    row_of, weights = (np.asarray(each[:NUM_CHECKED_ROWS]) for each in given[1:])
    expected = np.zeros((len(row_of), rows.shape[1]), np.float32)
    for k in range(TOP_K):
        expected += weights[:, k, None] * rows[row_of[:, k]].astype(np.float32)
    different = np.asarray(y)[: len(row_of)] != expected.astype(rows.dtype)
    return f"{different.sum()} of {different.size} numbers differ" if different.any() else None


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(rng.integers(2**31)), shape, jnp.bfloat16)


def print_table(results: list[dict[str, Any]], copy: float) -> None:
    print(f"\ncopy {copy / 1e9:.0f} GB/s")
    print(f"{'case':48} {'by':10} {'us':>9} {'device us':>9} {'GB/s':>7} {'of copy':>8}  result")
    for row in results:
        label = f"{row['case']:48} {row['implementation']:10}"
        constants = " ".join(f"{key}={value}" for key, value in row.get("constants", {}).items())
        if "error" in row:
            print(label, "failed:", row["error"].splitlines()[0][:80], constants)
            continue
        device = "-" if row["device_us"] is None else f"{row['device_us']:.1f}"
        print(
            f"{label} {row['us']:9.1f} {device:>9} {row['gb_per_s']:7.0f} {row['of_copy']:8.0%}  "
            f"{row['wrong'] or 'equal'}{'' if row['cold'] else ', in L2'} {constants}"
        )


if __name__ == "__main__":
    sys.exit(main())
