"""Which experts to replicate and where to put them so that all ranks get the same load.

DeepSeek's expert-parallelism load balancer (github.com/deepseek-ai/EPLB): greedy, on the host, for
all layers at once. Loads are any non-negative numbers that add up: counts of routed tokens.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place `num_replicas` slots over `num_gpus` ranks of `num_nodes` nodes by the load [L, E].

    Where the groups of experts divide over the nodes, groups are given to nodes first and all of a
    group's replicas stay on its node (hierarchical); otherwise nodes and groups do not count
    (global). Nothing keeps two replicas of an expert off one rank.

    Returns the expert in each slot [L, R], the slots of each expert [L, E, X] padded with -1, where
    X is the largest number of replicas of any expert, and the number of replicas [L, E]. Slot p is
    on rank p // (R / num_gpus). Ties fall to the lower index.

    Raises ValueError when the sizes do not divide or a load is negative or not finite.
    """
    weight = np.asarray(weight, np.float64)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [layers, experts], got shape {weight.shape}")
    if not (np.isfinite(weight).all() and (weight >= 0).all()):
        raise ValueError("expert loads must be finite and not negative")
    num_layers, num_experts = weight.shape
    sizes = dict(num_groups=num_groups, num_nodes=num_nodes, num_gpus=num_gpus)
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    for what, divisor in (
        (("num_experts", num_experts), ("num_groups", num_groups)),
        (("num_gpus", num_gpus), ("num_nodes", num_nodes)),
        (("num_replicas", num_replicas), ("num_gpus", num_gpus)),
    ):
        if what[1] % divisor[1]:
            raise ValueError(
                f"{what[0]} ({what[1]}) must be divisible by {divisor[0]} ({divisor[1]})"
            )
    if num_replicas < num_experts:
        raise ValueError(f"num_replicas ({num_replicas}) must be at least {num_experts} experts")

    # Groups to nodes: experts by node, those of a group side by side.
    group_size = num_experts // num_groups
    group_load = weight.reshape(num_layers, num_groups, group_size).sum(-1)
    groups = _pack(group_load, num_nodes).reshape(num_layers, num_groups)
    by_node = groups[:, :, None] * group_size + np.arange(group_size)[None, None]
    by_node = by_node.reshape(num_layers * num_nodes, num_experts // num_nodes)

    # A node is a row from here on: its replicas, then those to its ranks.
    layer = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    load = weight[layer, by_node]
    replica_of, replica_rank, counts = _replicate(load, num_replicas // num_nodes)
    share = np.take_along_axis(load / counts, replica_of, axis=1)
    order = _pack(share, num_gpus // num_nodes).reshape(replica_of.shape)
    replica_of, replica_rank = (
        np.take_along_axis(of_replica, order, axis=1) for of_replica in (replica_of, replica_rank)
    )

    experts = np.take_along_axis(by_node, replica_of, axis=1)
    physical_to_logical = experts.reshape(num_layers, num_replicas)
    ranks = replica_rank.reshape(num_layers, num_replicas)
    num_of_expert = np.empty((num_layers, num_experts), np.int64)
    num_of_expert[layer, by_node] = counts
    logical_to_physical = np.full((num_layers, num_experts, counts.max(initial=1)), -1, np.int64)
    rows = np.arange(num_layers)[:, None]
    logical_to_physical[rows, physical_to_logical, ranks] = np.arange(num_replicas)[None]
    return physical_to_logical, logical_to_physical, num_of_expert


def improve(weight: np.ndarray, slots: np.ndarray, num_gpus: int) -> np.ndarray:
    """Slots [L, P] that `rebalance_experts` gives for the load [L, E], as near to `slots` as they
    can be named. Layers that would not be better balanced by it stay as they are.

    Ranks and the slots of a rank are interchangeable: ranks are matched so that most experts are
    where they are already, and those keep their slots.
    """
    num_slots = slots.shape[1]
    found, _, _ = rebalance_experts(weight, num_slots, 1, 1, num_gpus)
    old_load, new_load = (rank_load(weight, of, num_gpus) for of in (slots, found))
    is_better = new_load.max(-1) < old_load.max(-1)
    improved = slots.copy()
    for layer in np.flatnonzero(is_better):
        shape = (num_gpus, num_slots // num_gpus)
        improved[layer] = _rename(slots[layer].reshape(shape), found[layer].reshape(shape)).ravel()
    return improved


def _rename(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The ranks of `new` [G, e], and the slots of each, in an order in which few differ from
    `old`."""
    experts = np.arange(max(old.max(), new.max()) + 1)
    before, after = ((of[:, :, None] == experts).any(1).astype(np.float32) for of in (old, new))
    _, chosen = linear_sum_assignment(before @ after.T, maximize=True)
    renamed = np.full_like(old, -1)
    for rank, of_rank in enumerate(new[chosen]):
        left = list(of_rank)
        for slot, expert in enumerate(old[rank]):
            if expert in left:
                left.remove(expert)
                renamed[rank, slot] = expert
        renamed[rank, renamed[rank] < 0] = left
    return renamed


def rank_load(counts: np.ndarray, physical_to_logical: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of each rank [..., L, G] when experts have `counts` [..., L, E] and their replicas,
    slots [L, P], share it evenly."""
    num_layers, num_slots = physical_to_logical.shape
    if num_slots % num_ranks:
        raise ValueError(f"{num_slots} slots do not divide over {num_ranks} ranks")
    if counts.shape[-2] != num_layers:
        raise ValueError(f"counts of {counts.shape[-2]} layers, slots of {num_layers}")
    layer = np.arange(num_layers)[:, None]
    replicas = np.zeros(counts.shape[-2:], np.int64)
    np.add.at(replicas, (layer, physical_to_logical), 1)
    share = counts / np.maximum(replicas, 1)
    of_slot = share[..., layer, physical_to_logical]
    return of_slot.reshape(*of_slot.shape[:-1], num_ranks, num_slots // num_ranks).sum(-1)


def balancedness(load: np.ndarray) -> float:
    """How evenly ranks are loaded, in (0, 1]: of each layer the mean over the max of `load`
    [..., L, G] of the ranks, averaged over layers (and passes).

    Layers wait for their own slowest rank, so ranks are compared within a layer, never by their
    sums over layers. A layer without any load is balanced.
    """
    mean, most = load.mean(-1), load.max(-1)
    return float(np.divide(mean, most, out=np.ones_like(mean), where=most > 0).mean())


def _pack(weight: np.ndarray, num_packs: int) -> np.ndarray:
    """The items [B, N] in packs of equal number, [B, num_packs, N / num_packs]: the heaviest first,
    each to the lightest pack that is not full."""
    num_rows, num_items = weight.shape
    capacity = num_items // num_packs
    if capacity == 1:
        return np.broadcast_to(np.arange(num_items)[None, :, None], (num_rows, num_items, 1))
    rows = np.arange(num_rows)
    packs = np.empty((num_rows, num_packs, capacity), np.int64)
    filled = np.zeros((num_rows, num_packs), np.int64)
    load = np.zeros((num_rows, num_packs))
    for item in np.argsort(-weight, axis=-1, kind="stable").T:
        pack = load.argmin(-1)
        place = filled[rows, pack]
        packs[rows, pack, place] = item
        filled[rows, pack] += 1
        load[rows, pack] += weight[rows, item]
        load[rows[place == capacity - 1], pack[place == capacity - 1]] = np.inf
    return packs


def _replicate(weight: np.ndarray, num_replicas: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One replica of every expert [B, E], then one more of whichever has most load a replica.

    Returns the expert of each replica and its number among that expert's [B, R], and how many each
    expert has [B, E].
    """
    num_rows, num_experts = weight.shape
    rows = np.arange(num_rows)
    replica_of = np.empty((num_rows, num_replicas), np.int64)
    replica_rank = np.zeros((num_rows, num_replicas), np.int64)
    replica_of[:, :num_experts] = np.arange(num_experts)[None]
    counts = np.ones((num_rows, num_experts), np.int64)
    for replica in range(num_experts, num_replicas):
        expert = (weight / counts).argmax(-1)
        replica_of[:, replica] = expert
        replica_rank[:, replica] = counts[rows, expert]
        counts[rows, expert] += 1
    return replica_of, replica_rank, counts
