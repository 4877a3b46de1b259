"""`Recording`: where tokens went while a model served, in memory and as a file.

A file is a NumPy archive (.npz, nothing pickled): the arrays of `Recording`, and `header`, a JSON
object with `format`, `mode`, `ep_size`, `top_k`, `member` and `num_members`. Each member of a group
writes its own tokens, to all ranks of the group; `load_merged` adds members up.
"""

import dataclasses
import enum
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.eplb.algorithm import balancedness


FORMAT = "jaxmoe expert distribution 1"


class RecordingMode(enum.Enum):
    """How finely: in all, step by step, token by token."""

    STAT = "stat"
    PER_PASS = "per_pass"
    PER_TOKEN = "per_token"


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """N passes of L MoE layers; in mode `stat` N is 1, all passes together.

    Attributes:
      counts: [N, L, E], choices of logical experts.
      of_rank: [N, L, G], the same by the rank that got the token.
      num_tokens: [N]; each of them makes `top_k` choices in each layer.
      slots: [L, P], the expert of each slot when recording ended.
      topk_idx: in mode `per_token` [tokens of all passes, L, K], the experts that each token chose;
        pass after pass, within a pass by rank.
      member, num_members: whose tokens these are; after merging member 0 of 1.
    """

    mode: RecordingMode
    counts: np.ndarray
    of_rank: np.ndarray
    num_tokens: np.ndarray
    slots: np.ndarray
    top_k: int
    topk_idx: np.ndarray | None = None
    member: int = 0
    num_members: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError where the parts do not belong together."""
        shapes = {"counts": self.counts.ndim, "of_rank": self.of_rank.ndim,
                  "num_tokens": self.num_tokens.ndim, "slots": self.slots.ndim}  # fmt: skip
        if shapes != {"counts": 3, "of_rank": 3, "num_tokens": 1, "slots": 2}:
            raise ValueError(f"a recording's arrays must have 3, 3, 1 and 2 axes, got {shapes}")
        num_passes, num_layers, num_experts = self.counts.shape
        if (
            self.of_rank.shape[:2] != (num_passes, num_layers)
            or self.num_tokens.shape != (num_passes,)
            or len(self.slots) != num_layers
        ):
            raise ValueError(
                f"a recording's arrays must be of the same passes and layers, got "
                f"{self.counts.shape}, {self.of_rank.shape}, {self.num_tokens.shape} and "
                f"{self.slots.shape}"
            )
        if self.slots.size and not (0 <= self.slots.min() and self.slots.max() < num_experts):
            raise ValueError(f"a recording's slots must hold experts in [0, {num_experts})")
        if not 0 <= self.member < self.num_members:
            raise ValueError(f"member {self.member} of {self.num_members} members")
        if min(self.counts.min(initial=0), self.of_rank.min(initial=0)) < 0:
            raise ValueError("a recording's counts must not be negative")
        expected = np.broadcast_to(self.num_tokens[:, None] * self.top_k, (num_passes, num_layers))
        for name, counts in (("experts", self.counts), ("ranks", self.of_rank)):
            if (wrong := np.argwhere(counts.sum(-1) != expected)).size:
                index = tuple(wrong[0])
                raise ValueError(
                    f"counts of {name} must add up to tokens times top-k: pass {index[0]}, layer "
                    f"{index[1]} has {counts.sum(-1)[index]}, not {expected[index]}"
                )
        if (self.topk_idx is not None) != (self.mode is RecordingMode.PER_TOKEN):
            raise ValueError("a recording has the choices of tokens in mode per_token only")
        if self.topk_idx is not None:
            shape = (int(self.num_tokens.sum()), num_layers, self.top_k)
            if self.topk_idx.shape != shape:
                raise ValueError(
                    f"a recording's choices must be {shape}, got {self.topk_idx.shape}"
                )

    @property
    def ep_size(self) -> int:
        return self.of_rank.shape[2]

    @property
    def num_experts(self) -> int:
        return self.counts.shape[2]

    @property
    def total(self) -> np.ndarray:
        """Choices of logical experts in all passes [L, E]."""
        return self.counts.sum(0)

    @property
    def balancedness(self) -> float:
        """Of what ranks got, pass by pass; of the sums in mode `stat`."""
        return balancedness(self.of_rank)

    def save(self, path: Path) -> None:
        header = {
            "format": FORMAT,
            "mode": self.mode.value,
            "ep_size": self.ep_size,
            "top_k": self.top_k,
            "member": self.member,
            "num_members": self.num_members,
        }
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        if self.topk_idx is not None:
            arrays["topk_idx"] = self.topk_idx
        with path.open("wb") as file:  # NumPy would append .npz to a name
            np.savez_compressed(file, header=np.array(json.dumps(header)), **arrays)


_ARRAYS = ("counts", "of_rank", "num_tokens", "slots")


def load(path: Path) -> Recording:
    """Raises ValueError, naming the file, for what is no recording."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            if header.get("format") != FORMAT:
                raise ValueError(f"its format must be {FORMAT!r}, got {header.get('format')!r}")
            return Recording(
                mode=RecordingMode(header["mode"]),
                **{name: file[name] for name in _ARRAYS},
                top_k=header["top_k"],
                topk_idx=file["topk_idx"] if "topk_idx" in file else None,
                member=header["member"],
                num_members=header["num_members"],
            )
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no recording of an expert distribution: {error}") from error


def load_merged(paths: Sequence[Path]) -> Recording:
    """What all members of a group have recorded together, each of which has a file here."""
    recordings = [load(path) for path in paths]
    return recordings[0] if len(recordings) == 1 else merge(recordings)


def merge(recordings: Sequence[Recording]) -> Recording:
    """The recordings that the members of a group made at the same time, added up, by member.

    Raises ValueError when they are not one of each member, or not of the same passes.
    """
    parts = sorted(recordings, key=lambda part: part.member)
    first = parts[0]
    if [part.member for part in parts] != list(range(first.num_members)):
        raise ValueError(
            f"there must be one recording of each of {first.num_members} members, got those of "
            f"members {[part.member for part in parts]}"
        )
    kinds = {(p.mode, p.counts.shape, p.ep_size, p.top_k, p.slots.tobytes()) for p in parts}
    if len(kinds) > 1:
        raise ValueError("the members' recordings must be of the same passes, model and placement")
    topk_idx = None
    if first.topk_idx is not None:
        by_pass = [_split(part) for part in parts]
        topk_idx = np.concatenate(
            [part for of_pass in zip(*by_pass, strict=True) for part in of_pass]
        )
    return dataclasses.replace(
        first,
        counts=sum(part.counts for part in parts),
        of_rank=sum(part.of_rank for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        topk_idx=topk_idx,
        member=0,
        num_members=1,
    )


def _split(recording: Recording) -> list[np.ndarray]:
    assert recording.topk_idx is not None
    return np.split(recording.topk_idx, np.cumsum(recording.num_tokens)[:-1])
