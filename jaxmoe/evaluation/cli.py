"""`jaxmoe eval`: accuracy on the evaluation sets."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import jax

from jaxmoe.evaluation import BACKENDS, evaluate
from jaxmoe.plan import (
    DEEPEP_MODES,
    DTYPES,
    MOE_A2A_BACKENDS,
    QUANTIZATION_HELP,
    QUANTIZATIONS,
    SINGLE_BATCH_OVERLAP_HELP,
    TWO_BATCH_OVERLAP_HELP,
)
from jaxmoe.reference.torch_deepseek import ReferenceUnavailableError
from jaxmoe.tasks import EVALUATION_SETS


EXIT_OK, EXIT_SOME_FAILED, EXIT_ERROR = 0, 1, 2
MAX_FAILURES_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-path", metavar="DIR", help="model directory; left out, the embedded model")
    add(
        "--set",
        action="append",
        dest="sets",
        choices=EVALUATION_SETS,
        help="may be repeated; all by default",
    )
    add("--limit", type=int, metavar="N", help="only the first N items of each set")
    add("--backend", choices=BACKENDS, default="jax", help="torch: transformers, on the CPU")
    add(
        "--base-url", metavar="URL", help="ask this OpenAI-compatible server: http://host:port[/v1]"
    )
    add("--json", action="store_true", help="one line of JSON instead of the tables")
    add("--output", metavar="FILE", help="write JSON with every item's answer, for --baseline")
    add(
        "--baseline",
        metavar="FILE",
        help="an earlier --output to compare with, item by item (McNemar's exact test)",
    )
    add("--expert-load", action="store_true", help="add a table of expert load by prompt domain")
    add("--ep-size", type=int, metavar="N", help="devices the experts are spread over (all)")
    add("--ep-num-redundant-experts", type=int, metavar="N", help="extra expert slots")
    add("--deepep-mode", choices=DEEPEP_MODES, default="auto", help="(%(default)s)")
    add("--moe-a2a-backend", choices=MOE_A2A_BACKENDS, default="reference", help="(%(default)s)")
    add("--enable-two-batch-overlap", action="store_true", help=TWO_BATCH_OVERLAP_HELP)
    add("--enable-single-batch-overlap", action="store_true", help=SINGLE_BATCH_OVERLAP_HELP)
    add("--dtype", choices=DTYPES, default="auto", help="auto: float32 on CPU, else the model's")
    add("--quantization", choices=QUANTIZATIONS, help=QUANTIZATION_HELP)
    add(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="items at a time; of a server, requests in flight (%(default)s)",
    )
    add("--max-new-tokens", type=int, default=128, metavar="N", help="(%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, 1 if items got no answer, 2 for an error that stopped the run."""
    if args.output is not None:
        _check_output(Path(args.output), args.baseline)
    if args.ep_size is not None:
        # On a machine with CPUs only, ranks are virtual devices. Another caller in this process may
        # have started JAX already; the mesh checks what it needs.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", args.ep_size)
    try:
        report = evaluate(
            args.model_path,
            sets=args.sets or EVALUATION_SETS,
            limit=args.limit,
            backend=args.backend,
            base_url=args.base_url,
            baseline=args.baseline,
            ep_size=args.ep_size,
            num_redundant_experts=args.ep_num_redundant_experts,
            deepep_mode=args.deepep_mode,
            moe_a2a_backend=args.moe_a2a_backend,
            two_batch_overlap=args.enable_two_batch_overlap,
            single_batch_overlap=args.enable_single_batch_overlap,
            dtype=args.dtype,
            quantization=args.quantization,
            batch_size=args.batch_size,
            max_new_tokens=args.max_new_tokens,
            expert_load=args.expert_load,
            shows_progress=True,
        )
    except ReferenceUnavailableError as error:
        print(f"jaxmoe eval: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    if args.output is not None:
        report.write(args.output)
    print(json.dumps(report.to_dict()) if args.json else report.format_table())
    failed = report.failures
    for result in failed[:MAX_FAILURES_SHOWN]:
        print(f"jaxmoe eval: {result.id}: {result.error}", file=sys.stderr)
    if failed:
        print(f"jaxmoe eval: {len(failed)} items got no answer", file=sys.stderr)
    return EXIT_SOME_FAILED if failed else EXIT_OK


def _check_output(output: Path, baseline: str | None) -> None:
    """Before the work is done that would be lost."""
    if not output.parent.is_dir():
        raise ValueError(f"the directory of the output {output} does not exist")
    if output.is_dir():
        raise ValueError(f"the output {output} is a directory")
    if baseline is not None and output.exists() and output.samefile(baseline):
        raise ValueError(f"the output must not be the baseline {baseline}")
