"""`ExpertPlacement`: which expert each physical slot holds, as an argument of the step.

A rebalance changes the values of these arrays and never their shapes, so it never recompiles.
Slot p lives on rank p // slots_per_rank. There may be more slots than experts.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """Placement of all MoE layers.

    Attributes:
      physical_to_logical: the expert in each slot.
      logical_to_physical: the slots of each expert, ascending; entries past `replicas` are -1.
      replicas: how many slots hold each expert, at least 1.
    """

    physical_to_logical: Int32[Any, "L P"]
    logical_to_physical: Int32[Any, "L E R"]
    replicas: Int32[Any, "L E"]

    def to_physical(
        self,
        topk_idx: Int32[Array, "T K"],
        *,
        layer: int,
        rank: Int32[Array, ""],
        slots_per_rank: int,
    ) -> Int32[Array, "T K"]:
        """Choose a slot for each chosen expert of MoE layer `layer`; -1 stays -1.

        Tokens stay on their rank where it has the expert. Others go round-robin over all replicas,
        and of the ranks without the expert each starts at the next replica, so that ranks with a
        token each do not all choose the same one.
        """
        num_tokens, _ = topk_idx.shape
        slots = self.logical_to_physical[layer]  # [E, R]
        owner = jnp.where(slots >= 0, slots // slots_per_rank, -1)
        is_local = owner == rank
        # Slots ascend, so that a rank's are side by side.
        is_new = jnp.diff(owner, axis=1, prepend=-1) != 0
        num_before = (is_new & (owner >= 0) & (owner < rank)).sum(1, dtype=jnp.int32)
        has_local = is_local.any(1)
        first = jnp.where(has_local, jnp.argmax(is_local, 1).astype(jnp.int32), 0)
        count = jnp.where(has_local, is_local.sum(1, dtype=jnp.int32), self.replicas[layer])
        offset = jnp.where(has_local, 0, rank - num_before)

        expert = jnp.maximum(topk_idx, 0)
        turn = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] + offset[expert]
        physical = slots[expert, first[expert] + turn % count[expert]]
        return jnp.where(topk_idx < 0, -1, physical)


def num_expert_slots(num_experts: int, ep_size: int, num_redundant: int | None = None) -> int:
    """Physical experts over all ranks: every expert and `num_redundant` replicas.

    None takes the fewest replicas with which the slots divide over the ranks, which they must.
    Raises ValueError when they do not.
    """
    fewest = num_experts + -num_experts % ep_size
    if num_redundant is None:
        return fewest
    num_slots = num_experts + num_redundant
    if num_redundant < 0 or num_slots % ep_size:
        enough = max(fewest, math.ceil(num_slots / ep_size) * ep_size)
        raise ValueError(
            f"num_physical_experts ({num_slots}) must be divisible by ep_size ({ep_size}) and at "
            f"least n_routed_experts ({num_experts}); {enough - num_experts} redundant experts "
            f"give {enough}"
        )
    return num_slots


def trivial_placement(num_layers: int, num_experts: int, num_slots: int) -> ExpertPlacement:
    """Slot p holds expert p % num_experts, in every layer."""
    slots = np.arange(num_slots, dtype=np.int32) % num_experts
    return make_placement(np.broadcast_to(slots, (num_layers, num_slots)), num_experts)


def make_placement(physical_to_logical: np.ndarray, num_experts: int) -> ExpertPlacement:
    """The placement with these slots, [L, P].

    Raises ValueError when a slot names no expert or an expert has no slot.
    """
    num_layers, num_slots = physical_to_logical.shape
    if num_slots < num_experts:
        raise ValueError(
            f"num_physical_experts ({num_slots}) must be at least n_routed_experts ({num_experts})"
        )
    if physical_to_logical.size and not (
        0 <= physical_to_logical.min() and physical_to_logical.max() < num_experts
    ):
        raise ValueError(
            f"every slot must hold an expert in [0, {num_experts}), got "
            f"{physical_to_logical.min()} to {physical_to_logical.max()}"
        )
    for layer, slots in enumerate(physical_to_logical):
        if (missing := np.setdiff1d(np.arange(num_experts), slots)).size:
            raise ValueError(f"layer {layer} has no slot for experts {missing.tolist()}")
    # An expert may at most own all the slots the others leave.
    max_replicas = num_slots - num_experts + 1
    layer = np.arange(num_layers)[:, None]
    replicas = np.zeros((num_layers, num_experts), np.int32)
    np.add.at(replicas, (layer, physical_to_logical), 1)
    by_expert = np.argsort(physical_to_logical, axis=1, kind="stable")
    expert = np.take_along_axis(physical_to_logical, by_expert, axis=1)
    first = np.cumsum(replicas, axis=1) - replicas
    table = np.full((num_layers, num_experts, max_replicas), -1, np.int32)
    table[layer, expert, np.arange(num_slots)[None] - first[layer, expert]] = by_expert
    return ExpertPlacement(
        physical_to_logical=np.array(physical_to_logical, np.int32),
        logical_to_physical=table,
        replicas=replicas,
    )
