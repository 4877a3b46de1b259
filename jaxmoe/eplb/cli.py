"""`jaxmoe eplb`: what recordings say about where experts should lie.

plan      a placement file for `--init-expert-location`
simulate  balancedness by number of ranks and of redundant slots
heatmap   a picture of which experts get the tokens
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.eplb.algorithm import balancedness, rank_load
from jaxmoe.eplb.location import plan, write_slots
from jaxmoe.eplb.placement import num_expert_slots, trivial_placement
from jaxmoe.eplb.recording import Recording, RecordingMode, load_merged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="plan|simulate|heatmap")
    for name, text in (
        ("plan", "write a placement file for --init-expert-location"),
        ("simulate", "balancedness by number of ranks and of redundant slots"),
        ("heatmap", "draw which experts get the tokens"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "recordings", nargs="+", type=Path, metavar="FILE",
            help="a recording; of a group's members, those of all",
        )  # fmt: skip
        if name == "heatmap":
            action.add_argument(
                "--output", type=Path, required=True, metavar="FILE", help="a picture: .svg, .png"
            )
            continue
        many: dict[str, Any] = {"nargs": "+"} if name == "simulate" else {}
        action.add_argument(
            "--ep-size", type=int, metavar="N", help="ranks; default: the recording's", **many
        )
        action.add_argument(
            "--ep-num-redundant-experts", type=int, metavar="N", **many,
            help="slots beyond the experts; default: as many as the recording had",
        )  # fmt: skip
        if name == "plan":
            action.add_argument(
                "--output",
                type=Path,
                required=True,
                metavar="FILE",
                help="the placement file, .json",
            )
        else:
            action.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    recording = load_merged(args.recordings)
    if not recording.num_tokens.sum():
        raise ValueError("the recording has no tokens")
    if args.action == "plan":
        return _plan(recording, args)
    if args.action == "simulate":
        return _simulate(recording, args)
    draw_heatmap(recording, args.output)
    return 0


def _plan(recording: Recording, args: argparse.Namespace) -> int:
    if args.output.suffix != ".json":
        raise ValueError(f"a placement file must end in .json, got {args.output}")
    ep_size = recording.ep_size if args.ep_size is None else args.ep_size
    redundant = args.ep_num_redundant_experts
    if redundant is None:
        redundant = recording.slots.shape[1] - recording.num_experts
    simulated = simulate(recording, ep_size, redundant)
    write_slots(args.output, simulated.slots)
    print(
        f"{args.output}: {simulated.slots.shape[1]} slots on {ep_size} ranks, balancedness "
        f"{simulated.trivial:.3f} with experts in order, {simulated.planned:.3f} as planned\n"
        f"serve with --ep-size {ep_size} --ep-num-redundant-experts {redundant} "
        f"--init-expert-location {args.output}"
    )
    return 0


@dataclasses.dataclass(frozen=True, eq=False)
class Simulated:
    """What a number of ranks and of redundant slots would give for a recording.

    Attributes:
      slots: [L, P], planned.
      trivial, planned: balancedness of the whole load with experts in order and with these slots.
      unseen: of the later half of the passes, planned by the earlier; None in mode `stat`.
    """

    ep_size: int
    redundant: int
    slots: np.ndarray
    trivial: float
    planned: float
    unseen: float | None


def simulate(recording: Recording, ep_size: int, redundant: int) -> Simulated:
    """Raises ValueError when the slots do not divide over the ranks."""
    if ep_size < 1:
        raise ValueError(f"--ep-size must be at least 1, got {ep_size}")
    num_slots = num_expert_slots(recording.num_experts, ep_size, redundant)
    counts = recording.total
    trivial = trivial_placement(len(counts), recording.num_experts, num_slots).physical_to_logical
    slots = plan(counts, num_slots, ep_size)
    unseen = None
    half = len(recording.counts) // 2
    if recording.mode is not RecordingMode.STAT and half:
        earlier, later = recording.counts[:half].sum(0), recording.counts[half:].sum(0)
        unseen = balancedness(rank_load(later, plan(earlier, num_slots, ep_size), ep_size))
    before, after = (balancedness(rank_load(counts, of, ep_size)) for of in (trivial, slots))
    return Simulated(ep_size, redundant, slots, before, after, unseen)


def _simulate(recording: Recording, args: argparse.Namespace) -> int:
    sizes = args.ep_size or [recording.ep_size]
    redundancies = args.ep_num_redundant_experts
    if redundancies is None:
        redundancies = [recording.slots.shape[1] - recording.num_experts]
    found: list[Simulated] = []
    refused: list[str] = []
    for ep_size in sizes:
        for redundant in redundancies:
            try:
                found.append(simulate(recording, ep_size, redundant))
            except ValueError as error:
                refused.append(f"{ep_size} ranks, {redundant} redundant: {error}")
    if not found:
        raise ValueError("; ".join(refused))
    if args.json:
        print(json.dumps(_document(recording, found, refused)))
    else:
        print(_table(recording, found, refused))
    return 0


def _document(recording: Recording, found: Sequence[Simulated], refused: Sequence[str]) -> object:
    names = ("ep_size", "redundant", "trivial", "planned", "unseen")
    return {
        "num_tokens": int(recording.num_tokens.sum()),
        "num_passes": len(recording.counts),
        "recorded_balancedness": recording.balancedness,
        "simulated": [{name: getattr(one, name) for name in names} for one in found],
        "refused": list(refused),
    }


def _table(recording: Recording, found: Sequence[Simulated], refused: Sequence[str]) -> str:
    lines = [
        f"{recording.num_tokens.sum()} tokens, top-{recording.top_k} of {recording.num_experts} "
        f"experts in {len(recording.slots)} layers; balancedness as recorded "
        f"{recording.balancedness:.3f} on {recording.ep_size} ranks",
        f"{'ranks':>6}{'redundant':>11}{'in order':>10}{'planned':>9}{'unseen':>8}",
    ]
    for one in found:
        unseen = "" if one.unseen is None else f"{one.unseen:.3f}"
        lines.append(
            f"{one.ep_size:>6}{one.redundant:>11}{one.trivial:>10.3f}{one.planned:>9.3f}{unseen:>8}"
        )
    return "\n".join([*lines, *(f"refused: {why}" for why in refused)])


def draw_heatmap(recording: Recording, path: Path) -> None:
    """Tokens of each expert and layer over the layer's mean, as a picture.

    Raises ValueError for a format that matplotlib does not write.
    """
    from matplotlib.figure import Figure  # slow to import

    counts = recording.total
    relative = counts / np.maximum(counts.mean(-1, keepdims=True), 1e-9)
    height = 1.2 + 0.16 * max(8, len(counts))
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(relative, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
    axes.set(xlabel="expert", ylabel="MoE layer", title="tokens of an expert over the layer's mean")
    figure.colorbar(image, ax=axes)
    figure.savefig(path)
