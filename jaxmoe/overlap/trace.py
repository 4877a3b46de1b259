"""`jaxmoe trace`: what a step does and when, for Perfetto and as a picture.

The step is a full batch of random tokens on each rank, compiled and warmed as in serving, then
profiled once. Its computation and its exchanges are rows of their own for each micro-batch.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.stages import Compiled

from custom_calls import runtime
from custom_calls.runtime import Link
from jaxmoe import batch as batches
from jaxmoe import kv_cache, sharding
from jaxmoe.batch import Batch
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.config import ModelConfig
from jaxmoe.kv_cache import KVCache
from jaxmoe.overlap.schedule import Stage
from jaxmoe.overlap.timeline import Timeline, read_profile, stages_of
from jaxmoe.plan import (
    DTYPES,
    MOE_A2A_BACKENDS,
    QUANTIZATION_HELP,
    QUANTIZATIONS,
    SINGLE_BATCH_OVERLAP_HELP,
    TBO_DECODE_SCHEDULE_HELP,
    TBO_DECODE_SCHEDULES,
    TWO_BATCH_OVERLAP_HELP,
    ExecutionPlan,
    make_plans,
    resolve_dtype,
    resolve_quantization,
)
from jaxmoe.step import ShardedModel, Steps, join_ep_group


PAGE_SIZE = 64
PHASES = ("prefill", "decode")
NUM_WARM_UPS = 2
DEFAULT_CPU_DEVICES = 8


class MeasuredStep:
    """A compiled step of a full batch, with a cache of its own to run in."""

    def __init__(self, model: ShardedModel, steps: Steps, arrays: Batch):
        self._operands = model.params, arrays, model.placement
        self._cache = cache_for(model, arrays)
        self.compiled: Compiled = steps.trace_forward(self._cache, arrays).lower().compile()

    def __call__(self) -> None:
        """Run the step to its end."""
        params, arrays, placement = self._operands
        out = self.compiled(params, self._cache, arrays, placement)
        self._cache = jax.block_until_ready(out)[1]

    @property
    def temporary_bytes(self) -> int:
        """Memory of a rank that the step needs while it runs, by XLA's analysis."""
        analysis = self.compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes


def cache_for(model: ShardedModel, arrays: Batch) -> KVCache:
    """A cache with the pages of a full batch."""
    pages = 1 + int(arrays.slots.max()) // PAGE_SIZE
    return kv_cache.allocate(
        model.config, model.mesh, num_pages=pages, page_size=PAGE_SIZE, dtype=model.dtype
    )


def full_batch(model: ShardedModel, phase: str, num_tokens: int, context: int) -> Batch:
    """A prompt of `num_tokens` tokens for each rank, or `num_tokens` requests of `context` each."""
    num_ranks = model.mesh.size
    if phase == "prefill":
        pages = -(-num_tokens // PAGE_SIZE)
        empty = batches.empty_prefill(num_ranks, num_tokens, pages)
    else:
        pages = -(-context // PAGE_SIZE)
        empty = batches.empty_decode(num_ranks, num_tokens, pages)
        pages *= num_tokens
    return batches.fill(
        empty,
        page_size=PAGE_SIZE,
        num_pages=1 + pages,
        vocab_size=model.config.vocab_size,
        context=context,
    )


def profile(step: MeasuredStep) -> Timeline:
    """The timeline of one run of a step that has been warmed up."""
    text = step.compiled.as_text()
    assert text is not None
    stages = stages_of(text)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            step()
        return read_profile(Path(directory), stages)


COLOURS = {
    Stage.ATTENTION_PREPARE: "#9ecae1",
    Stage.ATTENTION_CORE: "#4292c6",
    Stage.MLP: "#c7e9c0",
    Stage.GATE: "#fdd0a2",
    Stage.EXPERTS: "#31a354",
    Stage.SHARED_EXPERTS: "#a1d99b",
    Stage.OUTPUT: "#bcbddc",
}
EXCHANGE_COLOURS = {"dispatch": "#e6550d", "combine": "#756bb1"}
COPY_COLOUR = "#bdbdbd"  # a dispatch's or combine's own computation


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """A picture of the first rank's rows; the suffix of the path is the format.

    Raises ValueError for a format that matplotlib does not write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rank = timeline.ranks[0]
    micro_batches = sorted({s.micro_batch for s in timeline.computation})
    figure = Figure(figsize=(14, 1.6 + 0.8 * len(micro_batches)), layout="constrained")
    axes = figure.subplots()
    labels = []
    stages = {stage.value: colour for stage, colour in COLOURS.items()}
    seen = {}
    for micro_batch in micro_batches:
        for name, slices, colours in (
            ("computation", timeline.computation, stages),
            ("under way", timeline.exchanges, EXCHANGE_COLOURS),
        ):
            row = [s for s in slices if (s.rank, s.micro_batch) == (rank, micro_batch)]
            spans = [(1e3 * s.start, 1e3 * (s.stop - s.start)) for s in row]
            chosen = [colours.get(s.what, COPY_COLOUR) for s in row]
            seen |= {
                s.what if s.what in colours else "copies": c
                for s, c in zip(row, chosen, strict=True)
            }
            axes.broken_barh(spans, (-len(labels) - 0.4, 0.8), facecolors=chosen)
            labels.append(f"{micro_batch}: {name}")
    axes.set_yticks([-row for row in range(len(labels))], labels)
    axes.set_xlabel("ms")
    axes.set_title(title)
    order = [*stages, *EXCHANGE_COLOURS, "copies"]
    patches = [Patch(color=seen[what], label=what) for what in order if what in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxmoe trace`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-path", metavar="M", help="a Hugging Face directory")
    source.add_argument(
        "--random-config", choices=sorted(RANDOM_CONFIGS), help="a seeded random model"
    )
    add = parser.add_argument
    add("--ep-size", type=int, metavar="N", help="ranks; all devices by default, 8 on a CPU")
    add("--phase", choices=PHASES, default="prefill", help="default: prefill")
    add("--tokens", type=int, default=256, metavar="T", help="of a rank (default: %(default)s)")
    add(
        "--context", type=int, default=PAGE_SIZE, metavar="T",
        help="tokens of each request of a decode step (default: %(default)s)",
    )  # fmt: skip
    add("--moe-a2a-backend", choices=MOE_A2A_BACKENDS, default="loopback")
    add("--enable-two-batch-overlap", action="store_true", help=TWO_BATCH_OVERLAP_HELP)
    add("--enable-single-batch-overlap", action="store_true", help=SINGLE_BATCH_OVERLAP_HELP)
    add(
        "--tbo-decode-schedule", choices=tuple(TBO_DECODE_SCHEDULES), default="in_turns",
        help=TBO_DECODE_SCHEDULE_HELP,
    )  # fmt: skip
    add(
        "--link-bandwidth", type=float, metavar="B",
        help="loopback only: bytes a second that a modelled link lets leave a rank",
    )  # fmt: skip
    add(
        "--link-latency", type=float, default=0.0, metavar="S",
        help="loopback only: seconds that a modelled link takes",
    )  # fmt: skip
    add("--dtype", choices=DTYPES, default="auto")
    add("--quantization", choices=QUANTIZATIONS, help=QUANTIZATION_HELP)
    add("--output", type=Path, metavar="FILE", help="Trace Event JSON, for ui.perfetto.dev")
    add("--picture", type=Path, metavar="FILE", help="the first rank's rows, .svg, .png or .pdf")


def run(args: argparse.Namespace) -> int:
    for name in ("tokens", "context"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be positive, got {getattr(args, name)}")
    link = None
    if args.link_bandwidth is not None or args.link_latency:
        if args.moe_a2a_backend != "loopback":
            raise ValueError(
                f"only loopback has a modelled link, --moe-a2a-backend is {args.moe_a2a_backend}"
            )
        link = Link(latency=args.link_latency, bandwidth=args.link_bandwidth)
    # Another caller in this process may have started JAX already; the mesh checks what it needs.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(DEFAULT_CPU_DEVICES, args.ep_size or 1))
    with _model(args) as model:
        plans = make_plans(
            "auto",
            ep_size=model.ranks.ep_size,
            slots_per_rank=model.slots_per_rank,
            max_dispatch_tokens_per_rank=args.tokens,
            moe_a2a_backend=args.moe_a2a_backend,
            two_batch_overlap=args.enable_two_batch_overlap,
            single_batch_overlap=args.enable_single_batch_overlap,
            tbo_decode_schedule=args.tbo_decode_schedule,
            quantization=model.quantization,
        )
        timeline, temporary_bytes = _trace(model, plans, args, link)
    what = plans[PHASES.index(args.phase)].overlap_of(args.tokens).value
    if args.output:
        args.output.write_text(json.dumps(timeline.to_chrome_trace()), encoding="utf-8")
    if args.picture:
        draw(timeline, args.picture, f"{args.phase}, {args.tokens} tokens a rank, overlap: {what}")
    print(
        json.dumps({
            "phase": args.phase,
            "tokens_per_rank": args.tokens,
            "ep_size": model.ranks.ep_size,
            "overlap": what,
            "step_ms": round(1e3 * timeline.seconds, 3),
            "hidden_share": round(timeline.hidden_share(), 3),
            "temporary_bytes": temporary_bytes,
        })
    )  # fmt: skip
    return 0


def _trace(
    model: ShardedModel,
    plans: tuple[ExecutionPlan, ExecutionPlan],
    args: argparse.Namespace,
    link: Link | None,
) -> tuple[Timeline, int]:
    join_ep_group(model, plans, max_tokens=args.tokens, link=link)
    try:
        prefill, decode = plans
        steps = Steps(model, prefill=prefill, decode=decode)
        step = MeasuredStep(model, steps, full_batch(model, args.phase, args.tokens, args.context))
        for _ in range(NUM_WARM_UPS):
            step()
        return profile(step), step.temporary_bytes
    finally:
        runtime.shutdown()


@contextlib.contextmanager
def _model(args: argparse.Namespace) -> Iterator[ShardedModel]:
    with contextlib.ExitStack() as stack:
        path = args.model_path
        if path is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            path = write_random_checkpoint(
                directory / args.random_config,
                RANDOM_CONFIGS[args.random_config],
                seed=0,
                dtype="bfloat16" if args.dtype == "auto" else args.dtype,
            )
        config = ModelConfig.load(path)
        yield load_model(
            path,
            sharding.make_mesh(args.ep_size or jax.device_count()),
            dtype=resolve_dtype(args.dtype, config),
            quantization=resolve_quantization(args.quantization, config),
        )
