"""Dispatch and combine: what arrives, in which layout, and that it comes back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from custom_calls import ep


HIDDEN = 8
PERMUTES = ("reference", "cpu")


def on_ranks(num_ranks: int, function, *arrays):
    """Run `function` on each rank's part of arrays with a leading rank dimension."""
    mesh = Mesh(np.asarray(jax.devices()[:num_ranks]), ("ep",))

    def local(*parts):
        return jax.tree.map(lambda x: x[None], function(*(part[0] for part in parts)))

    run = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return jax.jit(run)(*arrays)


def make_case(num_ranks: int, num_tokens: int, slots_per_rank: int, top_k: int, kind: str):
    """Tokens, experts and weights of every rank; weights sum to one over real experts."""
    rng = np.random.default_rng(num_ranks * 100 + num_tokens)
    experts = num_ranks * slots_per_rank
    x = rng.standard_normal((num_ranks, num_tokens, HIDDEN)).astype(np.float32)
    idx = np.stack(
        [
            [rng.permutation(experts)[:top_k] for _ in range(num_tokens)]
            for _ in range(num_ranks)
        ]
    ).astype(np.int32).reshape(num_ranks, num_tokens, top_k)  # fmt: skip
    if kind == "one_expert":
        idx[:] = -1
        idx[..., 0] = experts - 1
    elif kind == "uneven":
        idx[0] = -1  # a rank without tokens
        idx[:, 1::2, top_k // 2 :] = -1  # tokens with fewer experts
    elif kind == "nothing":
        idx[:] = -1
    weights = rng.random(idx.shape).astype(np.float32) + 0.1
    weights = np.where(idx < 0, 0, weights)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9)
    return x, idx, weights


def normal_round_trip(slots_per_rank, permute, scale_by_expert, alignment=1):
    def run(x, idx, weights):
        in_flight = ep.normal_dispatch_start(
            x, idx, weights, axis_name="ep", slots_per_rank=slots_per_rank, permute=permute
        )
        tokens, handle = ep.normal_dispatch_finish(
            in_flight, slots_per_rank=slots_per_rank, alignment=alignment, permute=permute
        )
        if scale_by_expert:
            first = jax.lax.axis_index("ep") * slots_per_rank
            row = jnp.arange(tokens.x.shape[0], dtype=jnp.int32)
            group = jnp.searchsorted(tokens.group_starts, row, side="right") - 1
            factor = 1 + (first + group).astype(jnp.float32)
            tokens = dataclasses.replace(tokens, x=tokens.x * factor[:, None])
        back = ep.normal_combine_start(tokens, handle, axis_name="ep", permute=permute)
        return ep.normal_combine_finish(back, handle, permute=permute), tokens.group_sizes

    return run


def low_latency_round_trip(slots_per_rank, permute, scale_by_expert, alignment=1):
    def run(x, idx, weights):
        in_flight = ep.low_latency_dispatch_start(
            x, idx, weights, axis_name="ep", slots_per_rank=slots_per_rank, permute=permute
        )
        tokens, handle = ep.low_latency_dispatch_finish(
            in_flight, alignment=alignment, permute=permute
        )
        assert tokens.x.shape[1] % alignment == 0
        if scale_by_expert:
            first = jax.lax.axis_index("ep") * slots_per_rank
            factor = 1 + (first + jnp.arange(slots_per_rank)).astype(jnp.float32)
            tokens = type(tokens)(x=tokens.x * factor[:, None, None], counts=tokens.counts)
        back = ep.low_latency_combine_start(tokens, handle, axis_name="ep", permute=permute)
        return ep.low_latency_combine_finish(back, handle, permute=permute), tokens.counts

    return run


ROUND_TRIPS = {"normal": normal_round_trip, "low_latency": low_latency_round_trip}


@pytest.mark.parametrize("mode", ROUND_TRIPS)
@pytest.mark.parametrize("kind", ["random", "one_expert", "uneven", "nothing"])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "slots_per_rank", "top_k", "permute"),
    [(1, 5, 4, 2, "cpu"), (2, 1, 3, 6, "cpu"), (4, 7, 2, 3, "reference"), (8, 6, 1, 4, "cpu")],
)
def test_identity_experts_give_the_tokens_back(
    mode, kind, num_ranks, num_tokens, slots_per_rank, top_k, permute
):
    x, idx, weights = make_case(num_ranks, num_tokens, slots_per_rank, top_k, kind)
    run = ROUND_TRIPS[mode](slots_per_rank, permute, scale_by_expert=False)
    y, counts = on_ranks(num_ranks, run, x, idx, weights)
    has_expert = (idx >= 0).any(-1, keepdims=True)
    np.testing.assert_allclose(y, np.where(has_expert, x, 0), rtol=1e-6, atol=1e-6)
    load = np.bincount(idx[idx >= 0], minlength=num_ranks * slots_per_rank)
    np.testing.assert_array_equal(np.asarray(counts).ravel(), load)


@pytest.mark.parametrize("permute", PERMUTES)
@pytest.mark.parametrize("alignment", [1, 16, 128])
@pytest.mark.parametrize("mode", ROUND_TRIPS)
def test_every_copy_meets_its_own_expert(mode, alignment, permute):
    """Expert p multiplies by p + 1, so the result tells which experts a token met."""
    x, idx, weights = make_case(4, 9, 3, 5, "uneven")
    run = ROUND_TRIPS[mode](3, permute, scale_by_expert=True, alignment=alignment)
    y, _ = on_ranks(4, run, x, idx, weights)
    factor = (weights * (idx + 1)).sum(-1, keepdims=True)
    np.testing.assert_allclose(y, x * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ROUND_TRIPS)
def test_padding_rows_may_hold_nan(mode):
    x, idx, weights = make_case(2, 6, 2, 2, "random")
    idx[:, 3:] = -1
    x[:, 3:] = np.nan
    y, _ = on_ranks(2, ROUND_TRIPS[mode](2, None, scale_by_expert=False), x, idx, weights)
    np.testing.assert_allclose(y[:, :3], x[:, :3], rtol=1e-6, atol=1e-6)
    assert (np.asarray(y[:, 3:]) == 0).all()
