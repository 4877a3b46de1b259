import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.eplb.placement import make_placement, num_expert_slots, trivial_placement


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "slots"),
    [(32, 8, None, 32), (32, 6, None, 36), (5, 8, None, 8), (32, 8, 0, 32), (32, 8, 16, 48)],
)
def test_slots_divide_over_the_ranks(experts, ranks, redundant, slots):
    assert num_expert_slots(experts, ranks, redundant) == slots


@pytest.mark.parametrize("redundant", [-8, 0, 3])
def test_slots_that_do_not_divide_are_refused_with_a_number_that_does(redundant):
    message = (
        rf"\({32 + redundant}\) must be divisible by ep_size \(6\).*4 redundant experts give 36"
    )
    with pytest.raises(ValueError, match=message):
        num_expert_slots(32, 6, redundant)


def to_physical(placement, idx, rank, slots_per_rank):
    return np.asarray(
        placement.to_physical(
            jnp.asarray(idx, jnp.int32),
            layer=0,
            rank=jnp.int32(rank),
            slots_per_rank=slots_per_rank,
        )
    )


def test_a_slot_always_holds_the_expert_asked_for():
    rng = np.random.default_rng(0)
    slots = np.concatenate([rng.permutation(12), rng.integers(0, 12, 8)])[None]
    placement = make_placement(slots, 12)
    idx = rng.integers(-1, 12, (50, 4))
    for rank in range(5):
        physical = to_physical(placement, idx, rank, 4)
        np.testing.assert_array_equal(physical < 0, idx < 0)
        np.testing.assert_array_equal(slots[0][physical][idx >= 0], idx[idx >= 0])


def test_same_rank_first_then_round_robin():
    placement = make_placement(np.asarray([[0, 1, 0, 2, 0, 3]]), 4)  # two slots on each of 3 ranks
    idx = np.zeros((6, 1))
    assert set(to_physical(placement, idx, rank=1, slots_per_rank=2).ravel()) == {2}
    placement = make_placement(np.asarray([[0, 0, 0, 1, 2, 3]]), 4)  # expert 0: ranks 0, 0 and 1
    spread = to_physical(placement, idx, rank=2, slots_per_rank=2).ravel()
    np.testing.assert_array_equal(np.bincount(spread, minlength=3), [2, 2, 2])
    # Two replicas on the token's own rank share its tokens.
    own = to_physical(placement, idx, rank=0, slots_per_rank=2).ravel()
    np.testing.assert_array_equal(np.bincount(own, minlength=3), [3, 3, 0])


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_tokens_of_all_ranks_spread_evenly(seed, num_ranks, slots_per_rank, num_tokens):
    """Each rank has so many tokens, all for one expert: those that leave their rank are spread over
    its replicas as evenly as whole tokens can be, however few there are."""
    rng = np.random.default_rng(seed)
    num_slots = num_ranks * slots_per_rank
    slots = np.zeros(num_slots, np.int64)
    others = rng.permutation(num_slots)[: rng.integers(num_slots)]
    slots[others] = 1 + np.arange(len(others))
    placement = make_placement(slots[None], len(others) + 1)
    replicas = np.flatnonzero(slots == 0)
    owners = replicas // slots_per_rank
    arrived = np.zeros(num_slots, int)
    for rank in range(num_ranks):
        chosen = to_physical(placement, np.zeros((num_tokens, 1)), rank, slots_per_rank).ravel()
        if rank in owners:
            assert (chosen // slots_per_rank == rank).all()
            local = np.bincount(chosen, minlength=num_slots)[replicas[owners == rank]]
            assert local.max() - local.min() <= 1
        else:
            arrived += np.bincount(chosen, minlength=num_slots)
    uneven = min(num_tokens % len(replicas), -num_tokens % len(replicas))
    assert np.ptp(arrived[replicas]) <= max(1, uneven)


def test_trivial_placement_wraps_around():
    placement = trivial_placement(2, 3, 4)
    np.testing.assert_array_equal(placement.physical_to_logical, [[0, 1, 2, 0]] * 2)
    np.testing.assert_array_equal(placement.replicas, [[2, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1]], r"num_physical_experts \(2\) must be at least n_routed_experts \(3\)"),
        ([[0, 1, 3]], r"expert in \[0, 3\), got 0 to 3"),
        ([[0, 1, 1]], r"layer 0 has no slot for experts \[2\]"),
    ],
)
def test_refuses_impossible_placements(slots, message):
    with pytest.raises(ValueError, match=message):
        make_placement(np.asarray(slots), 3)
