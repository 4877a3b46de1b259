"""Paged attention against dense attention in float64."""

from functools import partial

import jax
import numpy as np
import pytest

from custom_calls import attention


HEADS, NOPE, ROPE, RANK, V = 3, 8, 4, 6, 5
SCALE = 0.37
mla_prefill = jax.jit(partial(attention.mla_prefill, scale=SCALE))
mla_decode = jax.jit(partial(attention.mla_decode, scale=SCALE))


def make_weights(rng):
    shapes = {"w_key": (HEADS, NOPE, RANK), "w_value": (HEADS, V, RANK)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def make_pool(rng, lengths, page_size, num_pages=40):
    """A pool with each request's latents on scattered pages; latents and page tables too."""
    pool = rng.standard_normal((num_pages, page_size, RANK + ROPE)).astype(np.float32)
    free = list(rng.permutation(np.arange(1, num_pages)))
    latents, tables = [], []
    for length in lengths:
        latent = rng.standard_normal((length, RANK + ROPE)).astype(np.float32)
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


def queries(rng, count):
    return (
        rng.standard_normal((count, HEADS, NOPE)).astype(np.float32),
        rng.standard_normal((count, HEADS, ROPE)).astype(np.float32),
    )


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_matches_dense_attention(page_size):
    rng = np.random.default_rng(page_size)
    weights = make_weights(rng)
    lengths, chunk_starts = [1, 9, 17], [0, 4, 0]  # the second request continues a chunk
    pool, latents, tables = make_pool(rng, lengths, page_size)
    tokens = [
        (request, position)
        for request, (length, start) in enumerate(zip(lengths, chunk_starts, strict=True))
        for position in range(start, length)
    ] + [(-1, -1)] * 3  # padding
    listed = [
        (page, request, i * page_size)
        for request, pages in enumerate(tables)
        for i, page in enumerate(pages)
    ]
    unused = [(0, -1, 0)] * 2
    page_ids, page_request, page_start = np.asarray(listed + unused, np.int32).T
    q_nope, q_rope = queries(rng, len(tokens))
    got = mla_prefill(
        q_nope,
        q_rope,
        pool,
        **weights,
        positions=np.asarray([p for _, p in tokens], np.int32),
        request=np.asarray([r for r, _ in tokens], np.int32),
        page_ids=page_ids,
        page_request=page_request,
        page_start=page_start,
        num_pages=np.int32(len(listed)),
    )
    for row, (request, position) in enumerate(tokens):
        if request < 0:
            assert (np.asarray(got[row]) == 0).all()
        else:
            want = dense(q_nope[row], q_rope[row], latents[request][: position + 1], weights)
            np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_absorbed_equals_expanded(page_size):
    rng = np.random.default_rng(page_size)
    weights = make_weights(rng)
    lengths = [1, 4, 5, 20, 0]
    pool, latents, tables = make_pool(rng, lengths, page_size)
    table = np.zeros((len(lengths), 24), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    q_nope, q_rope = queries(rng, len(lengths))
    q_latent = np.einsum("bnd,ndr->bnr", q_nope, weights["w_key"])
    attended = mla_decode(
        q_latent, q_rope, pool, page_table=table, lengths=np.asarray(lengths, np.int32)
    )
    got = np.einsum("bnr,ndr->bnd", attended, weights["w_value"])
    for row, length in enumerate(lengths):
        if length == 0:
            assert (np.asarray(attended[row]) == 0).all()
        else:
            want = dense(q_nope[row], q_rope[row], latents[row], weights)
            np.testing.assert_allclose(got[row], want, rtol=2e-5, atol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    pool, _, tables = make_pool(rng, [7, 30], 4)
    table = np.zeros((2, 8), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    q_latent = rng.standard_normal((2, HEADS, RANK)).astype(np.float32)
    q_rope = rng.standard_normal((2, HEADS, ROPE)).astype(np.float32)

    def attend(lengths):
        return np.asarray(
            mla_decode(
                q_latent,
                q_rope,
                pool,
                page_table=table,
                lengths=np.asarray(lengths, np.int32),
            )
        )

    np.testing.assert_array_equal(attend([7, 30])[0], attend([7, 0])[0])
