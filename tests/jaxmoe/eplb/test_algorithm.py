import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.eplb.algorithm import balancedness, improve, rank_load, rebalance_experts


# The example of DeepSeek's README: 16 slots, 4 groups, 2 nodes, 8 GPUs.
GOLDEN_WEIGHT = np.asarray(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
GOLDEN_SLOTS = np.asarray(
    [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
)


def test_golden_example():
    slots, _, _ = rebalance_experts(GOLDEN_WEIGHT, 16, 4, 2, 8)
    # Sorting need not be stable, so that only loads are comparable where there are ties.
    np.testing.assert_array_equal(
        np.sort(rank_load(GOLDEN_WEIGHT, slots, 8)),
        np.sort(rank_load(GOLDEN_WEIGHT, GOLDEN_SLOTS, 8)),
    )
    np.testing.assert_array_equal(slots, GOLDEN_SLOTS)  # it has none


@st.composite
def problems(draw):
    """Loads and sizes that divide, hierarchical and global, with many ties and zeros."""
    nodes = draw(st.integers(1, 3))
    gpus = nodes * draw(st.integers(1, 4))
    groups = draw(st.sampled_from([nodes, 2 * nodes, nodes + 1]))
    experts = groups * draw(st.integers(1, 4))
    slots = -(-experts // gpus) * gpus + gpus * draw(st.integers(0, 3))
    layers = draw(st.integers(1, 3))
    loads = draw(
        st.lists(
            st.sampled_from([0, 1, 1, 2, 7, 50, 1000]),
            min_size=layers * experts,
            max_size=layers * experts,
        )
    )
    weight = np.asarray(loads).reshape(layers, experts)
    return weight, slots, groups, nodes, gpus


@given(problems())
@settings(max_examples=300, deadline=None)
def test_invariants(problem):
    weight, num_slots, num_groups, num_nodes, num_gpus = problem
    num_layers, num_experts = weight.shape
    slots, slots_of, counts = rebalance_experts(*problem)
    assert slots.shape == (num_layers, num_slots)
    assert slots_of.shape == (num_layers, num_experts, counts.max())
    assert (counts >= 1).all()
    assert (counts.sum(-1) == num_slots).all()
    for layer, expert in itertools.product(range(num_layers), range(num_experts)):
        listed = slots_of[layer, expert]
        np.testing.assert_array_equal(
            np.sort(listed[: counts[layer, expert]]), np.flatnonzero(slots[layer] == expert)
        )
        assert (listed[counts[layer, expert] :] == -1).all()
    if num_groups % num_nodes == 0:
        group = slots // (num_experts // num_groups)
        node = np.arange(num_slots) // (num_slots // num_nodes)
        for layer in range(num_layers):
            of_group = [set(node[group[layer] == g].tolist()) for g in range(num_groups)]
            assert all(len(nodes) == 1 for nodes in of_group)
    np.testing.assert_allclose(rank_load(weight, slots, num_gpus).sum(-1), weight.sum(-1))


@given(problems())
@settings(max_examples=200, deadline=None)
def test_equals_the_description_followed_by_hand(problem):
    weight, _, _, _, num_gpus = problem
    slots, _, _ = rebalance_experts(*problem)
    for layer, loads in enumerate(weight.astype(float).tolist()):
        expected = place_by_hand(loads, *problem[1:])
        np.testing.assert_allclose(
            np.sort(rank_load(weight[layer : layer + 1], slots[layer : layer + 1], num_gpus)[0]),
            np.sort(expected),
        )


def pack_by_hand(loads, num_packs):
    """Heaviest first to the lightest pack with room; the packs' items."""
    capacity = len(loads) // num_packs
    if capacity == 1:
        return [[item] for item in range(len(loads))]
    packs = [[] for _ in range(num_packs)]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        open_packs = [pack for pack in packs if len(pack) < capacity]
        min(open_packs, key=lambda pack: sum(loads[i] for i in pack)).append(item)
    return packs


def place_by_hand(loads, num_slots, num_groups, num_nodes, num_gpus):
    """The load of each rank, node by node."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = len(loads) // num_groups
    of_group = [sum(loads[g * size : (g + 1) * size]) for g in range(num_groups)]
    ranks = []
    for groups in pack_by_hand(of_group, num_nodes):
        experts = [g * size + i for g in groups for i in range(size)]
        counts = dict.fromkeys(experts, 1)
        replicas = list(experts)
        while len(replicas) < num_slots // num_nodes:
            busiest = max(experts, key=lambda e: loads[e] / counts[e])  # the first of equals
            counts[busiest] += 1
            replicas.append(busiest)
        shares = [loads[e] / counts[e] for e in replicas]
        packs = pack_by_hand(shares, num_gpus // num_nodes)
        ranks += [sum(shares[i] for i in pack) for pack in packs]
    return ranks


@given(st.lists(st.integers(0, 20), min_size=2, max_size=4), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_no_other_replication_has_a_smaller_largest_share(loads, num_redundant):
    num_slots = len(loads) + num_redundant
    _, _, counts = rebalance_experts(np.asarray([loads]), num_slots, 1, 1, 1)
    best = min(
        max(load / (1 + extra.count(expert)) for expert, load in enumerate(loads))
        for extra in itertools.combinations_with_replacement(range(len(loads)), num_redundant)
    )
    assert (np.asarray(loads) / counts[0]).max() == pytest.approx(best)


def test_deepseek_v3_on_320_ranks_is_placed_in_half_a_second():
    weight = np.random.default_rng(0).gamma(0.5, size=(61, 256))
    for num_nodes, num_gpus in ((1, 320), (1, 80), (4, 32), (1, 8)):
        began = time.perf_counter()
        slots, _, _ = rebalance_experts(weight, 320, 8, num_nodes, num_gpus)
        assert time.perf_counter() - began < 0.5
        trivial = np.broadcast_to(np.arange(320) % 256, (61, 320))
        before, after = (balancedness(rank_load(weight, s, num_gpus)) for s in (trivial, slots))
        assert after > before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((16, 5, 1, 8), r"num_experts \(12\) must be divisible by num_groups \(5\)"),
        ((16, 4, 4, 2), r"num_gpus \(2\) must be divisible by num_nodes \(4\)"),
        ((18, 4, 2, 8), r"num_replicas \(18\) must be divisible by num_gpus \(8\)"),
        ((8, 4, 2, 8), r"num_replicas \(8\) must be at least 12"),
        ((16, 4, 2, 0), "num_gpus must be positive, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(GOLDEN_WEIGHT, *sizes)


@pytest.mark.parametrize("load", [-1.0, np.nan, np.inf])
def test_loads_that_are_none_are_refused(load):
    with pytest.raises(ValueError, match="finite and not negative"):
        rebalance_experts(np.asarray([[1.0, load]]), 2, 1, 1, 1)


def test_balancedness_compares_the_ranks_of_a_layer():
    # Each layer has one rank that does all the work; over the layers the ranks are even.
    assert balancedness(np.asarray([[4.0, 0.0], [0.0, 4.0]])) == 0.5
    assert balancedness(np.asarray([[4.0, 4.0], [0.0, 0.0], [1.0, 3.0]])) == pytest.approx(8 / 9)
    load = np.asarray([[1.0, 3.0, 2.0], [5.0, 5.0, 2.0]])  # not square: axes cannot be mistaken
    assert balancedness(load) == pytest.approx((2 / 3 + 4 / 5) / 2)
    # Passes are one more axis to average over.
    assert balancedness(np.stack([load, load])) == pytest.approx(balancedness(load))


@given(problems())
@settings(max_examples=100, deadline=None)
def test_balancedness_is_a_share(problem):
    weight, *_, num_gpus = problem
    slots, _, _ = rebalance_experts(*problem)
    assert 0 < balancedness(rank_load(weight, slots, num_gpus)) <= 1 + 1e-12


def test_replicas_share_their_experts_load():
    slots = np.asarray([[0, 0, 1, 0], [1, 0, 1, 0]])
    counts = np.asarray([[6, 1], [2, 8]])
    np.testing.assert_array_equal(rank_load(counts, slots, 2), [[4, 3], [5, 5]])
    np.testing.assert_array_equal(rank_load(np.stack([counts, 2 * counts]), slots, 2)[1],
                                  [[8, 6], [10, 10]])  # fmt: skip
    with pytest.raises(ValueError, match="4 slots do not divide over 3 ranks"):
        rank_load(counts, slots, 3)


def ranks_of(slots, num_gpus):
    """Of one layer: the experts of each rank, ranks and slots in an order of their own."""
    return sorted(tuple(sorted(rank)) for rank in slots.reshape(num_gpus, -1).tolist())


@given(problems(), st.integers(0, 2**16))
@settings(max_examples=200, deadline=None)
def test_improved_slots_are_the_new_ones_under_other_names(problem, seed):
    weight, num_slots, _, _, num_gpus = problem
    old_load = np.random.default_rng(seed).integers(0, 100, weight.shape)
    slots, _, _ = rebalance_experts(old_load, num_slots, 1, 1, num_gpus)
    found, _, _ = rebalance_experts(weight, num_slots, 1, 1, num_gpus)
    improved = improve(weight, slots, num_gpus)
    before, after = (rank_load(weight, of, num_gpus).max(-1) for of in (slots, improved))
    for layer in range(len(weight)):
        if (improved[layer] == slots[layer]).all():
            new = rank_load(weight, found, num_gpus)[layer].max()
            assert new >= before[layer] or ranks_of(found[layer], num_gpus) == ranks_of(
                slots[layer], num_gpus
            )
            continue
        assert after[layer] < before[layer]
        assert ranks_of(improved[layer], num_gpus) == ranks_of(found[layer], num_gpus)
        assert (improved[layer] != slots[layer]).sum() <= (found[layer] != slots[layer]).sum()
    assert (improve(weight, improved, num_gpus) == improved).all()
