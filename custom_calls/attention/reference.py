"""Multi-head latent attention over pages, in plain JAX. Local shapes.

Both forms walk the pages with an online softmax (Milakov and Gimelshein, arXiv:1805.02867): memory
does not grow with the context, the compiled shapes do not depend on it, and the loop ends at the
last page that holds anything. A page that is masked for a row leaves the row's numbers unchanged,
so a request's result does not depend on what else is in the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


MASKED = -1e30  # finite, so that a row with nothing to attend to stays free of NaN


def mla_prefill(
    q_nope: Float[Array, "T N nope"],
    q_rope: Float[Array, "T N rope"],
    pages: Float[Array, "pages page_size latent"],
    w_key: Float[Array, "N nope rank"],
    w_value: Float[Array, "N v rank"],
    *,
    positions: Int32[Array, " T"],
    request: Int32[Array, " T"],
    page_ids: Int32[Array, " W"],
    page_request: Int32[Array, " W"],
    page_start: Int32[Array, " W"],
    num_pages: Int32[Array, ""],
    scale: float,
) -> Float[Array, "T N v"]:
    """Causal attention of tokens to the pages of their own request, keys and values expanded.

    Token t attends to position p of a page when `request[t]` owns the page and p <= positions[t];
    a token of request -1 attends to nothing and gets zeros. Page w holds positions
    `page_start[w] + arange(page_size)`. Pages past `num_pages` are not read.
    """
    num_tokens, num_heads, _ = q_nope.shape
    page_size = pages.shape[1]
    rank, v_dim = w_value.shape[-1], w_value.shape[1]
    f32 = jnp.float32

    def attend(w, state):
        latent, k_rope = jnp.split(pages[page_ids[w]], [rank], axis=-1)  # [s, rank], [s, rope]
        keys = jnp.einsum("sr,ndr->snd", latent, w_key, preferred_element_type=f32)
        values = jnp.einsum("sr,ndr->snd", latent, w_value, preferred_element_type=f32)
        scores = jnp.einsum(
            "tnd,snd->tns", q_nope, keys.astype(q_nope.dtype), preferred_element_type=f32
        ) + jnp.einsum("tnd,sd->tns", q_rope, k_rope, preferred_element_type=f32)
        position = page_start[w] + jnp.arange(page_size, dtype=jnp.int32)
        visible = (position[None, :] <= positions[:, None]) & (
            (request == page_request[w]) & (request >= 0)
        )[:, None]
        return _accumulate(
            state,
            scores * scale,
            visible[:, None, :],
            lambda p: jnp.einsum(
                "tns,snd->tnd",
                p.astype(q_nope.dtype),
                values.astype(q_nope.dtype),
                preferred_element_type=f32,
            ),
        )

    state = jax.lax.fori_loop(0, num_pages, attend, _start(num_tokens, num_heads, v_dim))
    return _result(state).astype(q_nope.dtype)


def mla_decode(
    q_latent: Float[Array, "B N rank"],
    q_rope: Float[Array, "B N rope"],
    pages: Float[Array, "pages page_size latent"],
    *,
    page_table: Int32[Array, "B W"],
    lengths: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B N rank"]:
    """Attention of one token a request to the first `lengths` cached latents of its pages.

    The query is absorbed: its score with a latent is its score with the expanded key. The result
    is the attended latent, still to be expanded into values. Length 0 gives zeros.
    """
    batch, num_heads, rank = q_latent.shape
    page_size = pages.shape[1]
    f32 = jnp.float32

    def attend(w, state):
        entries = pages[page_table[:, w]]  # [B, s, latent]
        latent, k_rope = jnp.split(entries, [rank], axis=-1)
        scores = jnp.einsum(
            "bnr,bsr->bns", q_latent, latent, preferred_element_type=f32
        ) + jnp.einsum("bnr,bsr->bns", q_rope, k_rope, preferred_element_type=f32)
        position = w * page_size + jnp.arange(page_size, dtype=jnp.int32)
        visible = position[None, None, :] < lengths[:, None, None]
        return _accumulate(
            state,
            scores * scale,
            visible,
            lambda p: jnp.einsum(
                "bns,bsr->bnr", p.astype(latent.dtype), latent, preferred_element_type=f32
            ),
        )

    num_pages = (jnp.max(lengths) + page_size - 1) // page_size
    state = jax.lax.fori_loop(0, num_pages, attend, _start(batch, num_heads, rank))
    return _result(state).astype(q_latent.dtype)


def _start(rows: int, num_heads: int, features: int):
    """No page seen: maximum score, sum of weights and weighted sum of each row and head."""
    return (
        jnp.full((rows, num_heads, 1), MASKED, jnp.float32),
        jnp.zeros((rows, num_heads, 1), jnp.float32),
        jnp.zeros((rows, num_heads, features), jnp.float32),
    )


def _accumulate(state, scores, visible, weigh):
    """Take in one page: `weigh(p)` sums the page's values with weights p, [rows, N, s]."""
    maximum, total, weighted = state
    scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
    p = jnp.where(visible, jnp.exp(scores - new_maximum), 0.0)
    shrink = jnp.exp(maximum - new_maximum)
    return (
        new_maximum,
        total * shrink + jnp.sum(p, axis=-1, keepdims=True),
        weighted * shrink + weigh(p),
    )


def _result(state):
    _, total, weighted = state
    return weighted / jnp.where(total > 0, total, 1.0)
