"""Times of the tiles that a DeepGEMM kernel can have, beside the one that is chosen.

    python benchmarks/deep_gemm_tiles.py --output deep_gemm_tiles.json

The constants of `custom_calls/deep_gemm/tiles.py` are fitted to its results. Cases and timing are
those of `grouped_gemm.py`. Only tiles whose estimated cost is near the best are measured.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import grouped_gemm as common
import report
from custom_calls import deep_gemm
from custom_calls.deep_gemm import library, tiles
from custom_calls.deep_gemm.tiles import Layout, Problem, Tile
from custom_calls.gemm import deep_gemm as dense
from custom_calls.grouped_gemm import deep_gemm as grouped


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write all results as JSON")
    add("--cases", nargs="*", default=[], metavar="TEXT", help="cases with all of these in them")
    add("--within", type=float, default=1.5, help="times the lowest cost (%(default)s)")
    add("--most", type=int, default=40, help="tiles of a case (%(default)s)")
    add("--repeats", type=int, default=5, help="turns of each (%(default)s)")
    add("--budget", type=float, default=500, help="begin no case after so many seconds")
    args = parser.parse_args()
    args.dry_run = args.quick = False
    if (reason := deep_gemm.missing()) is not None:
        sys.exit(reason)
    began, results = time.monotonic(), []
    cases = [case for case in common.make_cases() if common.matches(case, args)]
    wanted = {case: chosen_tiles(case, args) for case in cases}
    common.progress(f"{sum(map(len, wanted.values()))} kernels")
    for case, each in wanted.items():
        shapes = jax.eval_shape(functools.partial(common.make_inputs, case, 0))
        for tile in each:
            jax.eval_shape(operation(case, tile), *shapes)
    deep_gemm.wait(progress=True)
    for case, each in wanted.items():
        if time.monotonic() - began > args.budget:
            break
        results += measure(case, each, args)
        if args.output:
            args.output.write_text(json.dumps(report.rounded(results)) + "\n", encoding="utf-8")
    return 0


def problem_of(case: common.Case) -> Problem:
    layout = Layout[case.layout.upper()]
    rows = case.rows if layout is Layout.DENSE else case.expected_rows
    block_m = common.ALIGNMENT if layout is Layout.CONTIGUOUS else None
    num_groups = 1 if layout is Layout.DENSE else case.num_groups
    is_fp8, sms = case.kind == "fp8", library.num_sms()
    return Problem(is_fp8, layout, rows, num_groups, case.num_out, case.depth, sms, block_m)


def chosen_tiles(case: common.Case, args: argparse.Namespace) -> list[Tile]:
    problem = problem_of(case)
    by_cost = sorted(tiles.candidates(problem), key=functools.partial(tiles.cost, problem))
    limit = args.within * tiles.cost(problem, by_cost[0])
    found = [tile for tile in by_cost if tiles.cost(problem, tile) <= limit][: args.most]
    chosen = tiles.choose_tile(problem)
    return [chosen, *(tile for tile in found if tile != chosen)]


def operation(case: common.Case, tile: Tile) -> Callable[[Any, Any], jax.Array]:
    dtype = jnp.dtype(jnp.bfloat16)
    if case.layout == "dense":
        return functools.partial(dense.gemm_fp8, dtype=dtype, tile=tile)
    function = grouped.masked if case.layout == "masked" else grouped.contiguous
    return functools.partial(function, dtype=dtype, expected_rows=case.expected_rows, tile=tile)


def measure(
    case: common.Case, wanted: list[Tile], args: argparse.Namespace
) -> list[dict[str, Any]]:
    first = common.make_inputs(case, 0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    num_sets = common.choose_num_sets(case, size)
    sets = [first, *(common.make_inputs(case, seed) for seed in range(1, num_sets))]
    runs: dict[Tile, common.Run] = {}
    rows, problem = [], problem_of(case)
    for tile in wanted:
        row = dataclasses.asdict(tile) | {"cost": tiles.cost(problem, tile)}
        rows.append({"case": case.label} | row)
        try:
            run = common.prepare_jax(operation(case, tile), sets)
            run.start(1)
            run.wait()
            rows[-1]["relative_error"] = float(common.errors(case, *first, run.output()))
            run.row = rows[-1]
            runs[tile] = run
        except Exception as error:
            rows[-1]["error"] = common.describe(error)
    common.take_turns({str(tile): run for tile, run in runs.items()}, args)
    for run in runs.values():
        run.row["us"] = statistics.median(run.times) * 1e6
    best = sorted((row for row in rows if "us" in row), key=lambda row: row["us"])
    chosen = rows[0].get("us", float("nan"))
    if best:
        print(f"{case.label}: chosen {chosen:.1f} us, {chosen / best[0]['us']:.3f} of the best")
    for row in best[:4] + [row for row in rows if "error" in row][:2]:
        common.progress(f"  {json.dumps(report.rounded(row))}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
