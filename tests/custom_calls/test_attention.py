"""Paged attention against dense attention in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls import attention


IMPLEMENTATIONS = ["reference", "cpu"]
TOLERANCES = {
    jnp.float32: {"rtol": 2e-5, "atol": 2e-5},
    jnp.bfloat16: {"rtol": 4e-2, "atol": 6e-2},
}
HEADS, NOPE, ROPE, RANK, V = 3, 8, 4, 6, 5
SCALE = 0.37

mla_prefill = jax.jit(partial(attention.mla_prefill, scale=SCALE), static_argnames="implementation")
mla_decode = jax.jit(partial(attention.mla_decode, scale=SCALE), static_argnames="implementation")

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)


def normal(rng, *shape, dtype=jnp.float32):
    """Numbers that `dtype` has, as float32."""
    return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype).astype(jnp.float32))


def make_weights(rng, dtype=jnp.float32):
    shapes = {"w_key": (HEADS, NOPE, RANK), "w_value": (HEADS, V, RANK)}
    return {name: normal(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def make_pool(rng, lengths, page_size, num_pages=40, dtype=jnp.float32):
    """A pool of NaN with each request's latents on scattered pages; latents and page tables too."""
    pool = np.full((num_pages, page_size, RANK + ROPE), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    latents, tables = [], []
    for length in lengths:
        latent = normal(rng, length, RANK + ROPE, dtype=dtype)
        pages = [int(free.pop()) for _ in range(-(-length // page_size))]
        for position in range(length):
            pool[pages[position // page_size], position % page_size] = latent[position]
        latents.append(latent)
        tables.append(pages)
    return pool, latents, tables


def dense(q_nope, q_rope, latent, weights):
    """One token's attention to all of `latent`, in float64: [N, V]."""
    q_nope, q_rope, latent = (x.astype(np.float64) for x in (q_nope, q_rope, latent))
    keys = np.einsum("sr,ndr->snd", latent[:, :RANK], weights["w_key"].astype(np.float64))
    values = np.einsum("sr,ndr->snd", latent[:, :RANK], weights["w_value"].astype(np.float64))
    scores = np.einsum("nd,snd->ns", q_nope, keys) + q_rope @ latent[:, RANK:].T
    p = np.exp(SCALE * (scores - scores.max(-1, keepdims=True)))
    return np.einsum("ns,snd->nd", p / p.sum(-1, keepdims=True), values)


def queries(rng, count, dtype=jnp.float32):
    return normal(rng, count, HEADS, NOPE, dtype=dtype), normal(
        rng, count, HEADS, ROPE, dtype=dtype
    )


def make_table(tables, width=24):
    table = np.full((len(tables), width), -1, np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    return table


def make_prefill(tokens, tables, page_size, num_unused=2):
    """The batch of (request, position) pairs over each request's pages."""
    listed = [
        (page, request, i * page_size)
        for request, pages in enumerate(tables)
        for i, page in enumerate(pages)
    ]
    page_ids, page_request, page_start = np.asarray(
        [*listed, *[(0, -1, 0)] * num_unused], np.int32
    ).T
    return dict(
        positions=np.asarray([p for _, p in tokens], np.int32),
        request=np.asarray([r for r, _ in tokens], np.int32),
        page_ids=page_ids,
        page_request=page_request,
        page_start=page_start,
        num_pages=np.int32(len(listed)),
    )


def cast(dtype, *arrays, **named):
    if arrays:
        return [jnp.asarray(array, dtype) for array in arrays]
    return {name: jnp.asarray(array, dtype) for name, array in named.items()}


def float32(array):
    return np.asarray(array.astype(jnp.float32))


@all_implementations
@all_dtypes
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_matches_dense_attention(page_size, dtype, implementation):
    rng = np.random.default_rng(page_size)
    weights = make_weights(rng, dtype)
    lengths, chunk_starts = [1, 9, 17, 40], [0, 4, 0, 39]  # the second request continues a chunk
    pool, latents, tables = make_pool(rng, lengths, page_size, 80, dtype)
    tokens = [
        (request, position)
        for request, (length, start) in enumerate(zip(lengths, chunk_starts, strict=True))
        for position in range(start, length)
    ]
    tokens = [*tokens[:3], *[(-1, -1)] * 2, *tokens[3:], (-1, -1)]  # padding, also in between
    q_nope, q_rope = queries(rng, len(tokens), dtype)
    got = float32(
        mla_prefill(
            *cast(dtype, q_nope, q_rope, pool),
            **cast(dtype, **weights),
            **make_prefill(tokens, tables, page_size),
            implementation=implementation,
        )
    )
    for row, (request, position) in enumerate(tokens):
        if request < 0:
            assert (got[row] == 0).all()
        else:
            want = dense(q_nope[row], q_rope[row], latents[request][: position + 1], weights)
            np.testing.assert_allclose(got[row], want, **TOLERANCES[dtype])


@all_implementations
@all_dtypes
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_absorbed_equals_expanded(page_size, dtype, implementation):
    rng = np.random.default_rng(page_size)
    weights = make_weights(rng, dtype)
    lengths = [1, 4, 5, 20, 0]
    pool, latents, tables = make_pool(rng, lengths, page_size, dtype=dtype)
    table = np.maximum(make_table(tables), 0)
    q_nope, q_rope = queries(rng, len(lengths), dtype)
    q_latent = np.einsum("bnd,ndr->bnr", q_nope, weights["w_key"])
    attended = float32(
        mla_decode(
            *cast(dtype, q_latent, q_rope, pool),
            page_table=table,
            lengths=np.asarray(lengths, np.int32),
            implementation=implementation,
        )
    )
    got = np.einsum("bnr,ndr->bnd", attended, weights["w_value"])
    for row, length in enumerate(lengths):
        if length == 0:
            assert (attended[row] == 0).all()
        else:
            want = dense(q_nope[row], q_rope[row], latents[row], weights)
            np.testing.assert_allclose(got[row], want, **TOLERANCES[dtype])


@pytest.mark.parametrize("heads, rank, rope", [(1, 16, 16), (17, 40, 8), (33, 128, 32)])
def test_implementations_agree_on_other_sizes(heads, rank, rope):
    rng = np.random.default_rng(heads)
    pool = normal(rng, 12, 16, rank + rope)
    table = rng.permutation(12).astype(np.int32).reshape(3, 4)
    q_latent, q_rope = normal(rng, 3, heads, rank), normal(rng, 3, heads, rope)
    lengths = np.asarray([64, 33, 0], np.int32)
    run = partial(mla_decode, q_latent, q_rope, pool, page_table=table, lengths=lengths)
    np.testing.assert_allclose(
        run(implementation="cpu"), run(implementation="reference"), rtol=1e-4, atol=1e-5
    )

    w_key, w_value = normal(rng, heads, 24, rank), normal(rng, heads, 20, rank)
    tokens = [(r, p) for r, n in enumerate([64, 33, 1]) for p in range(n)]
    run = partial(
        mla_prefill,
        normal(rng, len(tokens), heads, 24),
        normal(rng, len(tokens), heads, rope),
        pool,
        w_key,
        w_value,
        **make_prefill(tokens, table.tolist(), 16),
    )
    # Sums of terms as large as the largest result may cancel.
    want = np.asarray(run(implementation="reference"))
    np.testing.assert_allclose(
        run(implementation="cpu"), want, rtol=2e-5, atol=2e-5 * np.abs(want).max()
    )


@all_implementations
def test_a_decode_row_does_not_depend_on_its_neighbours(implementation):
    rng = np.random.default_rng(0)
    pool, _, tables = make_pool(rng, [7, 30], 4)
    table = np.maximum(make_table(tables, 8), 0)
    q_latent, q_rope = normal(rng, 2, HEADS, RANK), normal(rng, 2, HEADS, ROPE)

    def attend(lengths):
        return np.asarray(
            mla_decode(
                q_latent,
                q_rope,
                pool,
                page_table=table,
                lengths=np.asarray(lengths, np.int32),
                implementation=implementation,
            )
        )

    np.testing.assert_array_equal(attend([7, 30])[0], attend([7, 0])[0])


def test_a_prefilled_token_depends_on_its_context_alone():
    """Alone, among others or in chunks: the handler gives the same bits."""
    rng = np.random.default_rng(1)
    lengths, page_size = [50, 70], 16
    pool, _, tables = make_pool(rng, lengths, page_size)
    weights = make_weights(rng)
    tokens = [(r, p) for r, length in enumerate(lengths) for p in range(length)]
    q_nope, q_rope = queries(rng, len(tokens))

    def attend(rows):
        batch = make_prefill([tokens[row] for row in rows], tables, page_size)
        return np.asarray(
            mla_prefill(q_nope[rows], q_rope[rows], pool, **weights, **batch, implementation="cpu")
        )

    together = attend(list(range(120)))
    for rows in ([0], list(range(50)), list(range(47, 53)), list(range(61, 99)), [119, 3, 64]):
        np.testing.assert_array_equal(attend(rows), together[rows])


@all_implementations
def test_what_is_not_a_number_stays_with_those_who_see_it(implementation):
    rng = np.random.default_rng(2)
    pool, _, tables = make_pool(rng, [6, 6], 4)
    pool[tables[0][1], 0] = np.nan  # position 4 of request 0
    table = np.maximum(make_table(tables, 4), 0)
    q_latent, q_rope = normal(rng, 2, HEADS, RANK), normal(rng, 2, HEADS, ROPE)
    attended = mla_decode(
        q_latent,
        q_rope,
        pool,
        page_table=table,
        lengths=np.asarray([6, 6], np.int32),
        implementation=implementation,
    )
    assert np.isnan(attended[0]).all()
    assert np.isfinite(attended[1]).all()

    tokens = [(r, p) for r in range(2) for p in range(6)]
    got = np.asarray(
        mla_prefill(
            *queries(rng, 12),
            pool,
            **make_weights(rng),
            **make_prefill(tokens, tables, 4),
            implementation=implementation,
        )
    )
    is_nan = np.isnan(got).all(axis=(1, 2))
    assert is_nan.tolist() == [token in ((0, 4), (0, 5)) for token in tokens]
    assert np.isfinite(got[~is_nan]).all()


@pytest.mark.parametrize("page", [-1, 40, 2**31 - 1])
def test_pages_outside_the_pool_are_an_error_of_the_handler(page):
    rng = np.random.default_rng(3)
    pool, _, tables = make_pool(rng, [6], 4)
    tables[0][1] = page
    queries_ = normal(rng, 1, HEADS, RANK), normal(rng, 1, HEADS, ROPE)
    decode = partial(mla_decode, *queries_, pool, implementation="cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"page {page} is not one of the 40 pages"):
        table, lengths = make_table(tables, 2), np.asarray([6], np.int32)
        decode(page_table=table, lengths=lengths).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="length 9 needs more pages than 2"):
        table, lengths = np.zeros((1, 2), np.int32), np.asarray([9], np.int32)
        decode(page_table=table, lengths=lengths).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"page {page} is not one of the 40 pages"):
        mla_prefill(
            *queries(rng, 1),
            pool,
            **make_weights(rng),
            **make_prefill([(0, 5)], tables, 4),
            implementation="cpu",
        ).block_until_ready()


def test_best_on_cpu_is_the_handler():
    pool, table = jnp.zeros((2, 4, RANK + ROPE)), jnp.zeros((1, 2), jnp.int32)
    q_latent, q_rope = jnp.zeros((1, HEADS, RANK)), jnp.zeros((1, HEADS, ROPE))
    lowered = mla_decode.lower(
        q_latent, q_rope, pool, page_table=table, lengths=jnp.zeros((1,), jnp.int32)
    )
    assert "jaxmoe_cpu_mla_decode" in lowered.compile().as_text()


def test_bad_arguments():
    pool, table = jnp.zeros((2, 4, RANK + ROPE)), jnp.zeros((1, 2), jnp.int32)
    q_latent, q_rope = jnp.zeros((1, HEADS, RANK)), jnp.zeros((1, HEADS, ROPE))
    lengths = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"q_rope must have shape \(1, 3, 4\)"):
        mla_decode(q_latent, q_rope[..., :3], pool, page_table=table, lengths=lengths)
    with pytest.raises(ValueError, match="all be float32 or all bfloat16"):
        pages = pool.astype(jnp.bfloat16)
        mla_decode(q_latent, q_rope, pages, page_table=table, lengths=lengths)


@all_implementations
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(4)
    pool = normal(rng, 8 * 5, 16, RANK + ROPE)
    table = np.tile(np.asarray([[1, 2, 0], [3, 4, 0]], np.int32), (8, 1))
    lengths = rng.integers(0, 33, 16).astype(np.int32)
    q_latent, q_rope = normal(rng, 16, HEADS, RANK), normal(rng, 16, HEADS, ROPE)
    arrays = (q_latent, q_rope, pool, table, lengths)

    def attend(q_latent, q_rope, pool, table, lengths, implementation=implementation):
        return mla_decode(
            q_latent,
            q_rope,
            pool,
            page_table=table,
            lengths=lengths,
            implementation=implementation,
        )

    run = jax.shard_map(
        attend, mesh=mesh, in_specs=5 * (P("x"),), out_specs=P("x"), check_vma=check_vma
    )
    got = np.split(np.asarray(jax.jit(run)(*arrays)), 8)
    for rank, local in enumerate(zip(*(np.split(array, 8) for array in arrays), strict=True)):
        want = attend(*local, implementation="reference")
        np.testing.assert_allclose(got[rank], want, rtol=1e-4, atol=1e-5)
