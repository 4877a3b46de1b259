"""Dispatch and combine: what arrives, in which layout, and that it comes back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from custom_calls import ep, runtime
from custom_calls.layouts import ContiguousTokens
from custom_calls.quantize import quantize


HIDDEN = 192
MAX_TOKENS = 16
PERMUTES = ("reference", "cpu")


def make_mesh(num_ranks):
    return Mesh(np.asarray(jax.devices()[:num_ranks]), ("ep",))


def on_ranks(num_ranks: int, function, *arrays):
    """Run `function` on each rank's part of arrays with a leading rank dimension."""
    return compiled(num_ranks, function)(*arrays)


def compiled(num_ranks: int, function):
    mesh = make_mesh(num_ranks)

    def local(*parts):
        return jax.tree.map(lambda x: x[None], function(*(part[0] for part in parts)))

    run = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return jax.jit(run)


def make_case(num_ranks: int, num_tokens: int, slots_per_rank: int, top_k: int, kind: str):
    """Tokens, experts and weights of every rank; weights sum to one over real experts."""
    rng = np.random.default_rng(num_ranks * 100 + num_tokens)
    experts = num_ranks * slots_per_rank
    x = rng.standard_normal((num_ranks, num_tokens, 8)).astype(np.float32)
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


DISPATCHERS = {"normal": ep.NORMAL, "low_latency": ep.LOW_LATENCY}
BACKENDS = ["reference", "loopback"]


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    runtime.shutdown()


def make_dispatcher(backend, mode, num_ranks, slots_per_rank, top_k, **options):
    if backend == "loopback":
        runtime.bootstrap(
            make_mesh(num_ranks),
            runtime.EpSpec(
                max_ep_size=num_ranks,
                slots_per_rank=slots_per_rank,
                hidden_size=HIDDEN,
                top_k=top_k,
                normal_tokens=MAX_TOKENS,
                low_latency_tokens=MAX_TOKENS,
                itemsize=4,
                timeout=20.0,
            ),
        )
    return DISPATCHERS[mode][backend](axis_name="ep", slots_per_rank=slots_per_rank, **options)


def round_trip(dispatcher, scale_by_expert=False):
    """A function of a rank's x, experts and weights: what comes back, and the experts' load."""

    def run(x, idx, weights):
        arrived = dispatcher.dispatch_finish(dispatcher.dispatch_start(x, idx, weights))
        tokens, slots = arrived.tokens, dispatcher.slots_per_rank
        is_contiguous = isinstance(tokens, ContiguousTokens)
        if not is_contiguous:
            assert tokens.x.shape[1] % dispatcher.alignment == 0
        if scale_by_expert:
            first = jax.lax.axis_index("ep") * slots
            if is_contiguous:
                row = jnp.arange(tokens.x.shape[0], dtype=jnp.int32)
                group = jnp.searchsorted(tokens.group_starts, row, side="right") - 1
                factor = 1 + (first + group).astype(jnp.float32)[:, None]
            else:
                factor = 1 + (first + jnp.arange(slots)).astype(jnp.float32)[:, None, None]
            tokens = dataclasses.replace(tokens, x=tokens.x * factor.astype(tokens.x.dtype))
        back = dispatcher.combine_start(tokens, arrived.handle)
        y = dispatcher.combine_finish(back, arrived.handle)
        return y, tokens.group_sizes if is_contiguous else tokens.counts

    return run


all_backends = pytest.mark.parametrize("backend", BACKENDS)
all_modes = pytest.mark.parametrize("mode", DISPATCHERS)


@all_backends
@all_modes
@pytest.mark.parametrize("kind", ["random", "one_expert", "uneven", "nothing"])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "slots_per_rank", "top_k", "permute"),
    [(1, 5, 4, 2, "cpu"), (2, 1, 3, 6, "cpu"), (4, 7, 2, 3, "reference"), (8, 6, 1, 4, "cpu")],
)
def test_identity_experts_give_the_tokens_back(
    backend, mode, kind, num_ranks, num_tokens, slots_per_rank, top_k, permute
):
    x, idx, weights = make_case(num_ranks, num_tokens, slots_per_rank, top_k, kind)
    dispatcher = make_dispatcher(backend, mode, num_ranks, slots_per_rank, top_k, permute=permute)
    y, counts = on_ranks(num_ranks, round_trip(dispatcher), x, idx, weights)
    has_expert = (idx >= 0).any(-1, keepdims=True)
    np.testing.assert_allclose(y, np.where(has_expert, x, 0), rtol=1e-6, atol=1e-6)
    load = np.bincount(idx[idx >= 0], minlength=num_ranks * slots_per_rank)
    np.testing.assert_array_equal(np.asarray(counts).ravel(), load)


@all_backends
@pytest.mark.parametrize("permute", PERMUTES)
@pytest.mark.parametrize("alignment", [1, 16, 128])
@all_modes
def test_every_copy_meets_its_own_expert(backend, mode, alignment, permute):
    """Expert p multiplies by p + 1, so the result tells which experts a token met."""
    x, idx, weights = make_case(4, 9, 3, 5, "uneven")
    dispatcher = make_dispatcher(backend, mode, 4, 3, 5, permute=permute, alignment=alignment)
    y, _ = on_ranks(4, round_trip(dispatcher, scale_by_expert=True), x, idx, weights)
    factor = (weights * (idx + 1)).sum(-1, keepdims=True)
    np.testing.assert_allclose(y, x * factor, rtol=1e-5, atol=1e-5)


@all_backends
@all_modes
def test_padding_rows_may_hold_nan(backend, mode):
    x, idx, weights = make_case(2, 6, 2, 2, "random")
    idx[:, 3:] = -1
    x[:, 3:] = np.nan
    dispatcher = make_dispatcher(backend, mode, 2, 2, 2)
    y, _ = on_ranks(2, round_trip(dispatcher), x, idx, weights)
    np.testing.assert_allclose(y[:, :3], x[:, :3], rtol=1e-6, atol=1e-6)
    assert (np.asarray(y[:, 3:]) == 0).all()


@all_modes
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_loopback_is_the_reference_bit_by_bit(mode, dtype, num_ranks):
    x, idx, weights = make_case(num_ranks, 11, 3, 4 if num_ranks > 1 else 3, "uneven")
    x = jnp.asarray(x, dtype)
    results = []
    for backend in BACKENDS:
        dispatcher = make_dispatcher(backend, mode, num_ranks, 3, idx.shape[-1], alignment=4)
        results.append(on_ranks(num_ranks, round_trip(dispatcher, True), x, idx, weights))
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(np.asarray, results))


@all_modes
def test_active_ranks_get_what_they_would_if_the_others_had_nothing(mode):
    """The reference has all ranks; those that are not active have no tokens and get none."""
    x, idx, weights = make_case(4, 9, 2, 3, "random")
    reference, loopback = (
        compiled(4, round_trip(make_dispatcher(backend, mode, 4, 2, 3, alignment=4), True))
        for backend in BACKENDS
    )
    for active in ([0, 1, 2, 3], [3], [0, 2, 3], [1, 2], [0, 1, 2, 3]):
        chosen = np.where(np.isin(idx // 2, active), idx, -1)
        chosen[[rank for rank in range(4) if rank not in active]] = -1
        runtime.current().set_active(active)
        results = (run(x, chosen, weights) for run in (reference, loopback))
        jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, r) for r in results))
    assert loopback._cache_size() == 1


@all_backends
@all_modes
def test_fp8_tokens_arrive_with_their_scales(backend, mode):
    """Quantising before dispatch gives what quantising after it gives."""
    x, idx, weights = make_case(4, 9, 3, 5, "uneven")
    x = np.concatenate([x] * 24, -1)  # [.., 192]: the last block of 128 is cut

    def run(before):
        dispatcher = make_dispatcher(backend, mode, 4, 3, 5, alignment=4, fp8=before)

        def run(x, idx, weights):
            arrived = dispatcher.dispatch_finish(dispatcher.dispatch_start(x, idx, weights))
            tokens = arrived.tokens if before else quantize(arrived.tokens)
            if isinstance(tokens, ContiguousTokens):
                row = jnp.arange(tokens.x.shape[0], dtype=jnp.int32)[:, None]
                start, size = tokens.group_starts[None, :], tokens.group_sizes[None, :]
                is_token = ((row >= start) & (row < start + size)).any(-1)
            else:
                row = jnp.arange(tokens.x.shape[1], dtype=jnp.int32)[None, :]
                is_token = row < tokens.counts[:, None]
            scale = jnp.swapaxes(tokens.scale, -1, -2)[..., : is_token.shape[-1], :]
            values = jax.lax.bitcast_convert_type(tokens.x, jnp.uint8)
            return jnp.where(is_token[..., None], values, 0), jnp.where(
                is_token[..., None], scale, 0
            )

        return run

    before = on_ranks(4, run(True), x, idx, weights)
    after = on_ranks(4, run(False), x, idx, weights)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert np.asarray(before[1]).any()
