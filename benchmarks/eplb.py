"""What moving experts brings, what it costs, and what counting costs.

    python benchmarks/eplb.py --output eplb.json

Three parts, on the embedded model, with `--redundant` slots more than experts.

"ranks": the tokens that stories send to each expert, counted on one half of the stories to place
experts by, on the other to judge. On the judged half each rank's experts are timed alone, on one
device, with the rows that they get; a layer takes as long as its slowest rank, and layers add up.
The same for tokens that choose experts evenly, where there is nothing to gain. Sizes of the experts
and the number of tokens can be other than the embedded model's (`--hidden`, `--width`, `--tokens`).

"counting": a step with and without counting, in turns.

"serving": a loop under load whose prompts turn from problems to stories. Of each phase the
balancedness of what ranks got, window by window (the first value of a phase is the last of the one
before), and the intervals between the tokens that a request gets; nothing may be compiled.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import report
from custom_calls.grouped_gemm import row_alignment
from custom_calls.layouts import ContiguousTokens
from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.algorithm import balancedness, improve, rank_load
from jaxmoe.eplb.load import empty_load
from jaxmoe.eplb.placement import trivial_placement
from jaxmoe.evaluation.expert_load import count_choices
from jaxmoe.moe.experts import Experts
from jaxmoe.overlap.trace import cache_for, full_batch
from jaxmoe.step import Steps
from jaxmoe.tasks import evaluation_set
from jaxmoe.tokenizer import Tokenizer
from serving.config import ServerConfig
from serving.launch import Node, plans_of, prepare_devices, start_node
from serving.launch import load as load_model
from serving.request import Output, Request, SamplingParams


EVALUATION_SET = "new_seeds"  # it has all domains
CONTEXT = 512
L2_SETS = 4  # copies of a rank's operands, so that a call does not find its own in the cache


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    # Another caller in this process may have started JAX already; the mesh checks what it needs.
    with contextlib.suppress(RuntimeError):
        prepare_devices(args.ep_size, None)
    document: dict[str, Any] = {
        "benchmark": "eplb",
        "ep_size": args.ep_size,
        "redundant": args.redundant,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **report.origin(args.commit),
    }
    parts = {"ranks": measure_ranks, "counting": measure_counting, "serving": measure_serving}
    for name in args.parts or parts:
        document[name] = parts[name](args)
        report.write(args.output, document)
    print(json.dumps(document))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=["ranks", "counting", "serving"], help="default: all")
    add("--ep-size", type=int, default=8, metavar="N", help="ranks (%(default)s)")
    add("--redundant", type=int, default=8, metavar="N", help="redundant slots (%(default)s)")
    add("--tokens", type=int, default=4096, metavar="T", help="of a rank, when timing ranks")
    add("--hidden", type=int, metavar="H", help="of the timed experts; default: the model's")
    add("--width", type=int, metavar="F", help="of the timed experts; default: the model's")
    add("--items", type=int, default=200, metavar="N", help="stories counted (%(default)s)")
    add("--repeats", type=int, default=15, metavar="N", help="timed turns (%(default)s)")
    add("--iterations", type=int, default=400, metavar="N", help="steps before a rebalance")
    add("--windows", type=int, default=4, metavar="N", help="such windows of each domain")
    add("--requests", type=int, default=64, metavar="N", help="under way at a time")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--commit", metavar="ID", help="where git has none")
    return parser.parse_args(argv)


def server_config(args: argparse.Namespace, **flags: Any) -> ServerConfig:
    return ServerConfig(
        ep_size=args.ep_size,
        ep_num_redundant_experts=args.redundant,
        max_running_requests=args.requests,
        max_total_tokens=args.requests * CONTEXT,  # so that none waits for pages
        context_length=CONTEXT,
        disable_radix_cache=True,
        compilation_cache_dir="",
        **flags,
    )


# Ranks


def measure_ranks(args: argparse.Namespace) -> dict[str, Any]:
    config = ModelConfig.load(EMBEDDED_MODEL)
    placed, judged = count_stories(args)
    num_slots = config.n_routed_experts + args.redundant
    trivial = trivial_placement(config.num_moe_layers, config.n_routed_experts, num_slots)
    before = trivial.physical_to_logical
    uniform = np.random.default_rng(0).multinomial(
        int(judged[0].sum()), np.full(config.n_routed_experts, 1 / config.n_routed_experts),
        size=(2, config.num_moe_layers),
    )  # fmt: skip
    found = {}
    for name, (planned_by, load) in {"stories": (placed, judged), "uniform": uniform}.items():
        after = improve(planned_by, before, args.ep_size)
        slots = {"before": before, "after": after}
        found[name] = compare_placements(config, load, slots, args)
    return found


def count_stories(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Choices of experts [L, E] of two halves of the stories."""
    server = server_config(args)
    model = load_model(server, EMBEDDED_MODEL)
    prefill, _ = plans_of(server, model)
    steps = Steps(model, prefill=prefill, decode=prefill)
    prompts = list(itertools.islice(sequences("stories"), args.items))
    longest = max(map(len, prompts))
    halves = (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :])
    first, second = (count_choices(model, steps, half, max_tokens=longest) for half in halves)
    return first, second


def sequences(domain: str, *, with_answer: bool = True) -> Iterator[list[int]]:
    """The token ids of this domain's items."""
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    for item in evaluation_set(EVALUATION_SET):
        if item.domain == domain:
            messages = [{"role": "user", "content": item.question}]
            if with_answer:
                messages.append({"role": "assistant", "content": item.solution})
            yield tokenizer.apply_chat_template(messages, add_generation_prompt=not with_answer)


def compare_placements(
    config: ModelConfig, load: np.ndarray, slots: dict[str, np.ndarray], args: argparse.Namespace
) -> dict[str, Any]:
    """Times of the slowest ranks under each of these slots [L, P], with this load [L, E]."""
    tokens = args.tokens * args.ep_size * config.num_experts_per_tok
    scaled = load * (tokens / load.sum(-1, keepdims=True))
    sizes = {  # rows of each slot, [L, G, e]
        name: slot_load(scaled, of).reshape(len(of), args.ep_size, -1) for name, of in slots.items()
    }
    run = make_experts(config, args)
    times = {name: np.zeros((args.repeats, *size.shape[:2])) for name, size in sizes.items()}
    for repeat in range(-1, args.repeats):
        for layer, rank in np.ndindex(config.num_moe_layers, args.ep_size):
            for name, size in sizes.items():
                took = seconds(partial(run, size[layer, rank], repeat))
                if repeat >= 0:
                    times[name][repeat, layer, rank] = took
    medians = {name: np.median(of, axis=0) for name, of in times.items()}
    slowest = {name: float(of.max(-1).sum()) for name, of in medians.items()}
    balanced = {
        name: balancedness(rank_load(scaled, of, args.ep_size)) for name, of in slots.items()
    }
    return {
        "moved_slots": int((slots["before"] != slots["after"]).sum()),
        **{f"balancedness_{name}": round(value, 4) for name, value in balanced.items()},
        **{f"slowest_rank_ms_{name}": round(1e3 * of, 3) for name, of in slowest.items()},
        **{f"all_ranks_ms_{name}": round(1e3 * float(of.sum()), 3) for name, of in medians.items()},
        "ratio_of_balancedness": round(balanced["after"] / balanced["before"], 4),
        "speed_up": round(slowest["before"] / slowest["after"], 4),
    }


def slot_load(load: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Rows of each slot [L, P]: replicas share their expert's evenly."""
    return np.rint(rank_load(load, slots, slots.shape[1])).astype(np.int32)


def make_experts(
    config: ModelConfig, args: argparse.Namespace
) -> Callable[[np.ndarray, int], object]:
    """`run(sizes [e], turn)`: a rank's experts, on random rows, this many for each."""
    hidden, width = args.hidden or config.hidden_size, args.width or config.moe_intermediate_size
    wide = dataclasses.replace(config, hidden_size=hidden, moe_intermediate_size=width)
    num_slots = (config.n_routed_experts + args.redundant) // args.ep_size
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    alignment = row_alignment()
    rows = args.ep_size * args.tokens * min(num_slots, config.num_experts_per_tok)
    rows = -(-rows // alignment) * alignment + num_slots * alignment
    with jax.default_device(jax.devices()[0]):
        graphdef, params = nnx.split(nnx.eval_shape(lambda: Experts(wide, num_slots, dtype=dtype)))
        keys = iter(jax.random.split(jax.random.key(0), 64))
        sets = [
            (
                jax.tree.map(
                    lambda x: jax.random.normal(next(keys), x.shape, x.dtype) / x.shape[-1] ** 0.5,
                    params,
                ),
                jax.random.normal(next(keys), (rows, hidden), dtype),
            )
            for _ in range(L2_SETS)
        ]

    @jax.jit
    def experts(params: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
        tokens = ContiguousTokens(x, sizes, alignment)
        return nnx.merge(graphdef, params)(tokens, dtype=dtype).x

    def run(sizes: np.ndarray, turn: int) -> object:
        params, x = sets[turn % L2_SETS]
        return jax.block_until_ready(experts(params, x, sizes))

    return run


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# Counting


def measure_counting(args: argparse.Namespace) -> dict[str, Any]:
    server = server_config(args)
    model = load_model(server, EMBEDDED_MODEL)
    prefill, decode = plans_of(server, model)
    steps = Steps(model, prefill=prefill, decode=decode)
    found = {}
    for phase, tokens in (("prefill", 256), ("decode", max(1, args.requests // args.ep_size))):
        arrays = full_batch(model, phase, tokens, 256)
        load = empty_load(model.mesh, model.config.num_moe_layers, model.num_slots)
        state = {"cache": cache_for(model, arrays), "load": load}

        def plain(arrays=arrays, state=state) -> None:
            hidden, state["cache"] = steps.forward(state["cache"], arrays)
            jax.block_until_ready(hidden)

        def counting(arrays=arrays, state=state) -> None:
            hidden, state["cache"], state["load"], _ = steps.forward_with_load(
                state["cache"], state["load"], arrays
            )
            jax.block_until_ready(hidden)

        plain(), counting()
        taken: dict[str, list[float]] = {"plain": [], "counting": []}
        for turn in range(args.repeats * 20):
            runs = [("plain", plain), ("counting", counting)]
            for name, run in runs if turn % 2 else runs[::-1]:
                taken[name].append(seconds(run))
        median = {name: statistics.median(of) for name, of in taken.items()}
        ratios = [c / p for c, p in zip(taken["counting"], taken["plain"], strict=True)]
        found[phase] = {
            "tokens_per_rank": tokens,
            **{f"{name}_ms": round(1e3 * value, 3) for name, value in median.items()},
            "cost": round(median["counting"] / median["plain"] - 1, 4),
            "cost_of_pairs": round(statistics.median(ratios) - 1, 4),
        }
    return found


# Serving


def measure_serving(args: argparse.Namespace) -> dict[str, Any]:
    node = start_node(
        server_config(args, enable_eplb=True, eplb_rebalance_num_iterations=args.iterations), ""
    )
    node.loop.start()
    node.metrics.mark_ready()
    try:
        phases = {domain: serve_domain(node, domain, args) for domain in ("problems", "stories")}
        return {
            "iterations": args.iterations,
            **phases,
            "compilations": read(node, "compilations_after_ready"),
            "longest_pause_ms": round(1e3 * read(node, "eplb_longest_pause_seconds"), 2),
            **{name: read(node, f"eplb_{name}_total") for name in TOTALS},
        }
    finally:
        node.loop.shutdown()


TOTALS = ("rebalances", "skipped", "abandoned", "moved_slots", "moved_bytes", "seconds")


def read(node: Node, name: str, **labels: str) -> float:
    value = node.registry.get_sample_value(f"jaxmoe_{name}", labels)
    assert value is not None, name
    return value


def serve_domain(node: Node, domain: str, args: argparse.Namespace) -> dict[str, Any]:
    """Keep `--requests` questions under way for `--windows` windows; one that ends is followed by
    the next."""
    params = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    prompts = itertools.cycle(list(sequences(domain, with_answer=False)))
    free = threading.Semaphore(args.requests)
    intervals: list[float] = []
    windows: list[float] = []
    before = {phase: step_times(node, phase) for phase in ("prefill", "decode")}
    rids = map("{}-{}".format, itertools.repeat(domain), itertools.count())
    while len(windows) < args.windows:
        if free.acquire(timeout=0.02):
            node.loop.submit([Request(next(rids), next(prompts), params, Sink(free, intervals))])
        current = read(node, "eplb_balancedness")
        if not windows or current != windows[-1]:
            windows.append(current)
    while node.loop.num_running + node.loop.num_waiting:
        time.sleep(0.02)
    steps = {}
    for phase, (seconds_before, steps_before) in before.items():
        seconds_after, steps_after = step_times(node, phase)
        steps[f"{phase}_step_ms"] = round(
            1e3 * (seconds_after - seconds_before) / (steps_after - steps_before), 2
        )
    gaps = np.asarray(intervals)
    return {
        "balancedness": [round(value, 4) for value in windows],
        **steps,
        "median_interval_ms": round(1e3 * float(np.median(gaps)), 2),
        "p99_interval_ms": round(1e3 * float(np.quantile(gaps, 0.99)), 2),
        "longest_interval_ms": round(1e3 * float(gaps.max()), 2),
    }


def step_times(node: Node, phase: str) -> tuple[float, float]:
    """Seconds and number of the steps so far."""
    names = ("jaxmoe_step_seconds_sum", "jaxmoe_step_seconds_count")
    labels = {"phase": phase}  # unknown before the first
    total, count = (node.registry.get_sample_value(name, labels) or 0.0 for name in names)
    return total, count


class Sink:
    """Takes a request's outputs: notes the time from one token to the next."""

    def __init__(self, free: threading.Semaphore, intervals: list[float]):
        self._free, self._intervals = free, intervals
        self._last: float | None = None

    def __call__(self, output: Output) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._intervals.append(now - self._last)
        self._last = now
        if output.finish_reason is not None:
            self._free.release()


if __name__ == "__main__":
    sys.exit(main())
