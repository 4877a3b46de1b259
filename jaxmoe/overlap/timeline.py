"""What a step did and when, from a profile of it: the proof of an overlap.

    stages = stages_of(compiled.as_text())      which op of the program belongs to which stage
    timeline = read_profile(directory, stages)  when it ran on which rank
    timeline.hidden_share()                     what share of the exchanges was behind computation

A step's computation and its exchanges are rows of their own. An exchange is under way from the
moment its start begins to the moment its finish ends, the copies at both ends included.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxmoe.overlap.schedule import EXCHANGE, Stage


class Place(NamedTuple):
    """What an op of a program does: a stage of a layer for a micro-batch."""

    micro_batch: int
    layer: int
    stage: Stage
    is_exchange: bool
    """It hands tokens to other ranks or takes them; the rest of a stage is computation."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something a rank did without a pause, in seconds since the step began."""

    rank: int
    micro_batch: int
    layer: int
    what: str
    start: float
    stop: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Of one step. The slices of a rank's micro-batch do not overlap, neither its exchanges."""

    computation: tuple[Slice, ...]
    exchanges: tuple[Slice, ...]

    @property
    def seconds(self) -> float:
        return max((s.stop for s in self.computation + self.exchanges), default=0.0)

    @property
    def ranks(self) -> list[int]:
        return sorted({s.rank for s in self.computation})

    def hidden_share(self) -> float:
        """The share of the time with tokens under way in which their rank computed something."""
        under_way = hidden = 0.0
        for rank in self.ranks:
            busy = _union(s for s in self.computation if s.rank == rank)
            for start, stop in _union(s for s in self.exchanges if s.rank == rank):
                under_way += stop - start
                hidden += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in busy)
        return hidden / under_way if under_way else 0.0

    def to_chrome_trace(self) -> dict[str, Any]:
        """In the Trace Event Format, which Perfetto (ui.perfetto.dev) opens.

        A process for each rank; a thread for each micro-batch's computation and exchanges.
        """
        events: list[dict[str, Any]] = []
        names: dict[tuple[int, int], str] = {}
        for offset, slices in ((0, self.computation), (1, self.exchanges)):
            for s in slices:
                row = 2 * s.micro_batch + offset
                names[s.rank, row] = f"micro-batch {s.micro_batch}{' under way' if offset else ''}"
                events.append({
                    "ph": "X", "name": s.what, "cat": "exchange" if offset else "computation",
                    "pid": s.rank, "tid": row, "ts": 1e6 * s.start, "dur": 1e6 * (s.stop - s.start),
                    "args": {"layer": s.layer},
                })  # fmt: skip
        for (rank, row), name in sorted(names.items()):
            common = {"ph": "M", "pid": rank, "tid": row}
            events.append(common | {"name": "process_name", "args": {"name": f"rank {rank}"}})
            events.append(common | {"name": "thread_name", "args": {"name": name}})
            events.append(common | {"name": "thread_sort_index", "args": {"sort_index": row}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"')
_SCOPES = re.compile(r"micro_batch_(\d+)/layer_(\d+)/(\w+)")
_EXCHANGE_OP = re.compile(r'custom_call_target="jaxmoe_(?:loopback|cuda_deep_ep)_|\ball-to-all')


def stages_of(hlo: str) -> dict[str, Place]:
    """The place of each op of a compiled program, given as text, by the op's name."""
    places = {}
    for line in hlo.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None or (scopes := _SCOPES.search(found[2])) is None:
            continue
        stage = Stage(scopes[3])
        is_exchange = stage in EXCHANGE and _EXCHANGE_OP.search(line) is not None
        places[found[1]] = Place(int(scopes[1]), int(scopes[2]), stage, is_exchange)
    return places


def read_profile(directory: Path, stages: Mapping[str, Place]) -> Timeline:
    """The timeline of the one step that was profiled into this directory.

    Raises ValueError when the profile has none of its ops.
    """
    events = [event for file in sorted(directory.rglob("*.xplane.pb")) for event in _events(file)]
    events.sort(key=lambda event: event.start)
    ops = [_Op(*event, stages[event.name]) for event in events if event.name in stages]
    if not ops:
        raise ValueError(f"the profile in {directory} has no op of the step")
    began = ops[0].start
    last = {op.rank: op.start for op in ops}
    following = {  # the first one of each rank, as the later ones are replaced
        event.rank: event.start - began
        for event in reversed(events)
        if event.name not in stages and event.start > last.get(event.rank, math.inf)
    }
    ops = [op._replace(start=op.start - began, stop=op.stop - began) for op in ops]
    return Timeline(
        tuple(_stage_slices(op for op in ops if not op.place.is_exchange)),
        tuple(_exchange_slices(ops, following)),
    )


class _Event(NamedTuple):
    """An op of a program as it ran on a rank; seconds."""

    rank: int
    name: str
    start: float
    stop: float


class _Op(NamedTuple):
    """An op of the step's layers."""

    rank: int
    name: str
    start: float
    stop: float
    place: Place

    @property
    def row(self) -> tuple[int, int]:
        return self.rank, self.place.micro_batch


def _events(file: Path) -> Iterable[_Event]:
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        device = re.search(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats}
                if "hlo_op" in stats:
                    rank = int(device[1]) if device else int(stats["device_ordinal"])
                    start = 1e-9 * event.start_ns
                    stop = start + 1e-9 * event.duration_ns
                    yield _Event(rank, str(stats["hlo_op"]), start, stop)


def _stage_slices(ops: Iterable[_Op]) -> Iterable[Slice]:
    """Ops of a micro-batch that follow each other in one stage, as one slice."""
    for (rank, micro_batch), of_row in itertools.groupby(
        sorted(ops, key=lambda op: (op.row, op.start)), key=lambda op: op.row
    ):
        runs = [
            (place, [(op.start, op.stop) for op in group])
            for place, group in itertools.groupby(of_row, key=lambda op: op.place)
        ]
        starts = [times[0][0] for _, times in runs] + [math.inf]
        for (place, times), following in zip(runs, starts[1:], strict=True):
            for start, stop in _merged(times):
                if start < (stop := min(stop, following)):
                    yield Slice(rank, micro_batch, place.layer, place.stage.value, start, stop)


def _exchange_slices(ops: Sequence[_Op], following: Mapping[int, float]) -> Iterable[Slice]:
    """From a start to its finish; what is no pair, as XLA's all-to-all, for itself.

    An asynchronous op has run when what reads from it begins: in the end that is what follows the
    layers, which begins on each rank at `following`.
    """
    under_way: dict[tuple[int, int, str], float] = {}
    for i, op in enumerate(ops):
        if not op.place.is_exchange:
            continue
        what, _, half = op.place.stage.value.partition("_")
        if half == "start":
            under_way[*op.row, what] = op.start
            continue
        readers = (o.start for o in ops[i + 1 :] if o.row == op.row and _reads(o.place, op.place))
        start = under_way.pop((*op.row, what), op.start)
        stop = max(op.stop, next(readers, following.get(op.rank, op.stop)))
        yield Slice(*op.row, op.place.layer, what, start, stop)


_AFTER_DISPATCH = (Stage.DISPATCH_FINISH, Stage.EXPERTS)
_AFTER_COMBINE = (Stage.COMBINE_FINISH, Stage.OUTPUT)


def _reads(place: Place, finish: Place) -> bool:
    """Whether an op of a micro-batch can only run when this finish of its has."""
    if place.layer != finish.layer:
        return place.layer > finish.layer
    is_dispatch = finish.stage is Stage.DISPATCH_FINISH
    return place.stage in (_AFTER_DISPATCH if is_dispatch else _AFTER_COMBINE)


def _merged(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as intervals in order."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(times):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _union(slices: Iterable[Slice]) -> list[tuple[float, float]]:
    return _merged((s.start, s.stop) for s in slices)
