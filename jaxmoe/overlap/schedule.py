"""In which order the stages of a step run, for any number of micro-batches. Plain data, no JAX.

A schedule is a sequence of `Op`. What a stage computes is the model's; that it runs in this order
is `emit`'s. Law: every legal schedule gives the same numbers.

The orders are SGLang's two-batch and single-batch overlap (github.com/sgl-project/sglang,
`batch_overlap`), which are DeepSeek's (arXiv:2412.19437, section 3.4): while one micro-batch's
tokens are under way, another's are computed.
"""

import dataclasses
import enum
from collections.abc import Iterator, Sequence


class Stage(enum.Enum):
    """The stages of a layer. A dense layer has the first three, an MoE layer all but MLP."""

    ATTENTION_PREPARE = "attention_prepare"
    """Queries, and the tokens' latents written to the cache."""
    ATTENTION_CORE = "attention_core"
    MLP = "mlp"
    GATE = "gate"
    DISPATCH_START = "dispatch_start"
    DISPATCH_FINISH = "dispatch_finish"
    EXPERTS = "experts"
    COMBINE_START = "combine_start"
    COMBINE_FINISH = "combine_finish"
    SHARED_EXPERTS = "shared_experts"
    OUTPUT = "output"


EXCHANGE = (
    Stage.DISPATCH_START,
    Stage.DISPATCH_FINISH,
    Stage.EXPERTS,
    Stage.COMBINE_START,
    Stage.COMBINE_FINISH,
)
"""The stages that a layer has for each dispatch; the others it has once."""


class Overlap(enum.Enum):
    """What runs while tokens are under way."""

    NONE = "none"
    SINGLE_BATCH = "single_batch"
    """The shared experts, of the same tokens."""
    TWO_BATCH_IN_TURNS = "two_batch_in_turns"
    """The other micro-batch, in turns: attention or experts behind each exchange. SGLang's order of
    prefill."""
    TWO_BATCH_STAGGERED = "two_batch_staggered"
    """The other micro-batch, two stages behind; the shared experts. SGLang's order of decode."""

    @property
    def num_micro_batches(self) -> int:
        return 2 if self in _TWO_BATCH else 1


_TWO_BATCH = (Overlap.TWO_BATCH_IN_TURNS, Overlap.TWO_BATCH_STAGGERED)


@dataclasses.dataclass(frozen=True)
class Op:
    """One stage of one layer for one micro-batch; of its dispatch number `part` in `EXCHANGE`."""

    micro_batch: int
    layer: int
    stage: Stage
    part: int = 0


Schedule = tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers that are scheduled: first dense ones, then MoE layers.

    Attributes:
      num_parts: dispatches that a micro-batch of an MoE layer is split into, by micro-batch.
    """

    num_dense: int
    num_moe: int
    num_parts: tuple[int, ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.num_parts)


def make_schedule(overlap: Overlap, layers: Layers) -> Schedule:
    """The order of all stages of a step; a legal one."""
    delta = 2 if overlap is Overlap.TWO_BATCH_STAGGERED else 0
    segments = [_segments(overlap, layers, i) for i in range(layers.num_micro_batches)]
    schedule = interleave(segments, delta=delta)
    check_schedule(schedule, layers)
    return schedule


def interleave(segments: Sequence[Sequence[Sequence[Op]]], *, delta: int) -> Schedule:
    """Segments of micro-batches in turns, each `delta` segments behind the one before it."""
    last = max(len(own) + i * delta for i, own in enumerate(segments))
    return tuple(
        op
        for turn in range(last)
        for i, own in enumerate(segments)
        if 0 <= turn - i * delta < len(own)
        for op in own[turn - i * delta]
    )


def check_schedule(schedule: Schedule, layers: Layers) -> None:
    """Raise ValueError unless every stage runs once, and after all that it reads from."""
    done: set[Op] = set()
    expected = {op for i in range(layers.num_micro_batches) for op in _in_order(layers, i)}
    for op in schedule:
        if op not in expected or op in done:
            raise ValueError(f"a schedule must have every stage once, {op} is one too many")
        for before in _reads_from(op, layers):
            if before not in done:
                raise ValueError(f"{op} must run after {before}")
        done.add(op)
    if missing := expected - done:
        raise ValueError(f"a schedule must have every stage, {len(missing)} are missing")


def _segments(overlap: Overlap, layers: Layers, micro_batch: int) -> list[list[Op]]:
    """A micro-batch's stages in order, cut where another one's may run in between.

    Cut equally often for all, so that none gets ahead of the one before it.
    """
    num_parts = layers.num_parts[micro_batch]
    segments: list[list[Op]] = [[]]

    def add(layer: int, *stages: Stage, part: int = 0) -> None:
        if part < num_parts:
            segments[-1] += (Op(micro_batch, layer, stage, part) for stage in stages)

    def cut() -> None:
        segments.append([])

    for layer in range(layers.num_dense):
        add(layer, Stage.ATTENTION_PREPARE, Stage.ATTENTION_CORE, Stage.MLP)
    for layer in range(layers.num_dense, layers.num_dense + layers.num_moe):
        add(layer, Stage.ATTENTION_PREPARE)
        if overlap is Overlap.TWO_BATCH_STAGGERED:
            cut()
        add(layer, Stage.ATTENTION_CORE, Stage.GATE)
        for part in range(max(layers.num_parts)):
            if overlap is Overlap.TWO_BATCH_STAGGERED:
                cut()
            add(layer, Stage.DISPATCH_START, part=part)
            if part == 0 and overlap in (Overlap.SINGLE_BATCH, Overlap.TWO_BATCH_STAGGERED):
                add(layer, Stage.SHARED_EXPERTS)
            cut()
            add(layer, *EXCHANGE[1:4], part=part)
            cut()
            if part == num_parts - 1 and overlap in (Overlap.NONE, Overlap.TWO_BATCH_IN_TURNS):
                add(layer, Stage.SHARED_EXPERTS)
            add(layer, Stage.COMBINE_FINISH, part=part)
        if overlap is Overlap.TWO_BATCH_STAGGERED:
            cut()
        add(layer, Stage.OUTPUT)
    return segments


def _in_order(layers: Layers, micro_batch: int) -> Iterator[Op]:
    return (op for segment in _segments(Overlap.NONE, layers, micro_batch) for op in segment)


def _reads_from(op: Op, layers: Layers) -> Iterator[Op]:
    """The ops whose results an op needs. A chunk of a sequence also reads what the chunk before it
    wrote to the cache, so that the cache is written in the order of the micro-batches."""

    def own(stage: Stage, part: int = 0, layer: int = op.layer) -> Op:
        return Op(op.micro_batch, layer, stage, part)

    if op.stage is Stage.ATTENTION_PREPARE:
        if op.micro_batch > 0:
            yield Op(op.micro_batch - 1, op.layer, Stage.ATTENTION_PREPARE)
        if op.layer > 0:
            is_dense = op.layer <= layers.num_dense
            yield own(Stage.MLP if is_dense else Stage.OUTPUT, layer=op.layer - 1)
    elif op.stage is Stage.ATTENTION_CORE:
        yield own(Stage.ATTENTION_PREPARE)
    elif op.stage in (Stage.MLP, Stage.GATE, Stage.SHARED_EXPERTS):
        yield own(Stage.ATTENTION_CORE)
    elif op.stage is Stage.OUTPUT:
        yield own(Stage.SHARED_EXPERTS)
        yield own(Stage.COMBINE_FINISH, layers.num_parts[op.micro_batch] - 1)
    elif op.stage is not Stage.DISPATCH_START:
        yield own(EXCHANGE[EXCHANGE.index(op.stage) - 1], op.part)
    elif op.part > 0:  # a dispatcher has one exchange under way
        yield own(Stage.COMBINE_FINISH, op.part - 1)
    else:
        yield own(Stage.GATE)
