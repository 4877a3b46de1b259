"""Where experts lie at first, and the files that say so.

A placement file is JSON, an object with SGLang's keys: `physical_to_logical_map` [L, P], or
`logical_count` [L, E] (with passes before, [N, L, E]) to plan by. A recording (.npz) is planned by
its counts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.eplb.algorithm import improve
from jaxmoe.eplb.placement import make_placement, trivial_placement
from jaxmoe.eplb.recording import load


TRIVIAL = "trivial"
SLOTS_KEY, COUNT_KEY = "physical_to_logical_map", "logical_count"


def initial_slots(
    where: str, config: ModelConfig, num_slots: int, ep_size: int
) -> np.ndarray | None:
    """The expert of each slot [L, num_slots] that `where` asks for: None for "trivial", otherwise
    what the file of this name says.

    Raises ValueError, naming the file, when it is of another model or of other slots.
    """
    if where == TRIVIAL:
        return None
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"--init-expert-location must be trivial or a file, got {where}")
    num_layers, num_experts = config.num_moe_layers, config.n_routed_experts
    slots, counts = _read(path)
    try:
        if slots is not None:
            if slots.shape != (num_layers, num_slots):
                raise ValueError(
                    f"it places {' x '.join(map(str, slots.shape))} layers and slots, there are "
                    f"{num_layers} x {num_slots}: --ep-num-redundant-experts must be what it was "
                    "made for"
                )
            make_placement(slots, num_experts)
            return slots
        assert counts is not None
        if counts.shape != (num_layers, num_experts):
            raise ValueError(
                f"it counts {' x '.join(map(str, counts.shape))} layers and experts, the model has "
                f"{num_layers} x {num_experts}"
            )
        return plan(counts, num_slots, ep_size)
    except ValueError as error:
        raise ValueError(f"--init-expert-location {where}: {error}") from error


def plan(counts: np.ndarray, num_slots: int, ep_size: int) -> np.ndarray:
    """Slots [L, num_slots] for this load [L, E], as near to the trivial ones as may be."""
    num_layers, num_experts = counts.shape
    trivial = trivial_placement(num_layers, num_experts, num_slots).physical_to_logical
    return improve(counts, trivial, ep_size)


def write_slots(path: Path, slots: np.ndarray) -> None:
    """A placement file."""
    path.write_text(json.dumps({SLOTS_KEY: slots.tolist()}) + "\n", encoding="utf-8")


def _read(path: Path) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The slots [L, P] that a file has, or the counts [L, E]."""
    if path.suffix == ".npz":
        return None, load(path).total
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {SLOTS_KEY, COUNT_KEY} & set(content):
            raise ValueError(f"it must be an object with {SLOTS_KEY} or {COUNT_KEY}")
        key = SLOTS_KEY if SLOTS_KEY in content else COUNT_KEY
        array = np.asarray(content[key])
        if array.dtype.kind not in "iu" or array.ndim not in ((2,) if key == SLOTS_KEY else (2, 3)):
            raise ValueError(f"{key} must be a table of whole numbers")
    except ValueError as error:
        raise ValueError(f"{path} is no placement file: {error}") from error
    if key == SLOTS_KEY:
        return array, None
    return None, array.sum(0) if array.ndim == 3 else array
