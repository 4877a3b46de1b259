"""How much of the communication two-batch overlap hides, on CPU with a modelled link.

    python benchmarks/overlap.py --output overlap.json

The ranks are virtual devices of one process; tokens between them move at the speed of a modelled
link (`custom_calls.runtime.Link`), set so that communication takes `--ratio` of the computation's
time. 0.9 is about what 50 GB/s a GPU make of DeepSeek-V3's prefill: a layer of 4096 tokens sends
0.3 GB, 6.3 ms, and computes for 7 ms. That is a model of proportions, no claim about any machine.

In turns, medians of `--repeats` steps each: the step in sequence and in two micro-batches (decode
in both orders that there are); the step with a link that takes no time (computation only); its
exchanges alone (communication only).
hidden share = (serial - overlapped) / min(computation, communication); beside it, from the timeline
of one more step, the share of the time with tokens under way in which their rank computed. Both
peaks of temporary memory are XLA's own analysis of the compiled steps.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import report
from custom_calls import runtime
from custom_calls.runtime import Link
from jaxmoe import sharding
from jaxmoe.batch import Batch
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.moe.dispatcher import make_dispatcher
from jaxmoe.overlap.trace import MeasuredStep, cache_for, full_batch, profile
from jaxmoe.plan import ep_spec, make_plans
from jaxmoe.step import ShardedModel, Steps


WIDER = {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 12}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    model = random_model(args)
    document: dict[str, Any] = {
        "benchmark": "overlap",
        "ep_size": args.ep_size,
        "ratio": args.ratio,
        "decode_context": args.context,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **report.origin(args.commit),
    }
    for phase, tokens in (("prefill", args.prefill_tokens), ("decode", args.decode_rows)):
        document[phase] = measure(model, phase, tokens, args)
    report.write(args.output, document)
    print(json.dumps(document))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--ep-size", type=int, default=4, metavar="N", help="ranks, at most 8 (%(default)s)")
    add("--prefill-tokens", type=int, default=512, metavar="T", help="of a rank (%(default)s)")
    add("--decode-rows", type=int, default=32, metavar="B", help="of a rank (%(default)s)")
    add("--context", type=int, default=4096, metavar="T", help="of a decode row (%(default)s)")
    add("--ratio", type=float, default=0.9, metavar="X", help="communication to computation")
    add("--repeats", type=int, default=15, metavar="N", help="timed steps of each (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--commit", metavar="ID", help="where git has none")
    add("--dry-run", action="store_true", help="a small model")
    return parser.parse_args(argv)


def random_model(args: argparse.Namespace) -> ShardedModel:
    config = RANDOM_CONFIGS["tiny"] if args.dry_run else RANDOM_CONFIGS["v3-small"] | WIDER
    with tempfile.TemporaryDirectory() as directory:
        path = write_random_checkpoint(Path(directory) / "m", config, seed=0, dtype="float32")
        return load_model(path, sharding.make_mesh(args.ep_size), dtype=jnp.float32)


def measure(
    model: ShardedModel, phase: str, tokens: int, args: argparse.Namespace
) -> dict[str, float]:
    arrays = full_batch(model, phase, tokens, args.context)
    plans = {
        name: make_plans(
            "auto",
            ep_size=args.ep_size,
            slots_per_rank=model.slots_per_rank,
            max_dispatch_tokens_per_rank=tokens,
            moe_a2a_backend="loopback",
            two_batch_overlap=name != "serial",
            tbo_decode_schedule="staggered" if name == "staggered" else "in_turns",
        )
        for name in ("serial", "overlapped", "staggered")
        if phase == "decode" or name != "staggered"
    }
    spec = ep_spec(model.config, plans["overlapped"], max_tokens=tokens, dtype=model.dtype)
    runtime.bootstrap(model.mesh, spec)
    measured, programs = {}, {}
    for name, (prefill, decode) in plans.items():
        steps = Steps(model, prefill=prefill, decode=decode)
        programs[name] = measured[name] = MeasuredStep(model, steps, arrays)
        if name == "serial":
            programs["communication"] = exchanges_of(model, steps, arrays)
    programs["computation"] = programs["serial"]
    for run in programs.values():
        run()

    before = runtime.current().counters()["remote_bytes"]
    alone = statistics.median(seconds(programs["computation"]) for _ in range(args.repeats))
    sent = (runtime.current().counters()["remote_bytes"] - before) / args.repeats / args.ep_size
    link = Link(bandwidth=sent / (args.ratio * alone))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.repeats):
        for name, run in programs.items():
            runtime.shutdown()
            is_free = name == "computation"
            runtime.bootstrap(model.mesh, dataclasses.replace(spec, link=None if is_free else link))
            times[name].append(seconds(run))
    runtime.shutdown()
    runtime.bootstrap(model.mesh, dataclasses.replace(spec, link=link))
    shares = {name: profile(step).hidden_share() for name, step in measured.items()}
    runtime.shutdown()
    median = {name: statistics.median(values) for name, values in times.items()}
    bound = min(median["computation"], median["communication"])
    hidden = {name: (median["serial"] - median[name]) / bound for name in measured}
    return {
        "tokens_per_rank": tokens,
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in median.items()},
        **{f"{name}_hidden_share": round(share, 3) for name, share in hidden.items()},
        **{f"{name}_hidden_share_of_timeline": round(x, 3) for name, x in shares.items()},
        **{f"{name}_temporary_bytes": step.temporary_bytes for name, step in measured.items()},
    }


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def exchanges_of(model: ShardedModel, steps: Steps, arrays: Batch) -> Callable[[], None]:
    """The exchanges of a step, one after the other, with experts that do nothing."""
    config, plan = model.config, steps._plan(arrays)
    cache = cache_for(model, arrays)
    hidden, _, activations = steps.forward_with_activations(cache, arrays)
    topk_idx = activations.topk_idx  # of trivially placed experts: their slots
    dispatcher = make_dispatcher(plan)

    def on_rank(x: jax.Array, topk_idx: Sequence[jax.Array]) -> jax.Array:
        x = x[0]
        weights = jnp.full(topk_idx[0][0].shape, 1 / config.num_experts_per_tok, jnp.float32)
        for of_layer in topk_idx:
            start = dispatcher.dispatch_start(x, of_layer[0], weights)
            arrived = dispatcher.dispatch_finish(start)
            back = dispatcher.combine_start(arrived.tokens, arrived.handle)
            x = dispatcher.combine_finish(back, arrived.handle)
        return x

    spec = P(sharding.EP_AXIS)
    mapped = jax.shard_map(on_rank, mesh=model.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped)
    return lambda: jax.block_until_ready(compiled(hidden, topk_idx))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
