"""What the ops of `attention` mean, in plain JAX.

Both forms walk the pages with an online softmax (Milakov and Gimelshein, arXiv:1805.02867): memory
does not grow with the context, the compiled shapes do not depend on it, and the loop ends at the
last page that holds anything. A page that is masked for a row leaves the row's numbers unchanged,
so a request's result does not depend on what else is in the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from custom_calls.varying import as_varying, varying_axes


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
    num_tokens, num_heads, _ = q_nope.shape
    page_size = pages.shape[1]
    rank, v_dim = w_value.shape[-1], w_value.shape[1]
    f32 = jnp.float32
    q = jnp.concatenate((q_nope, q_rope), axis=-1).swapaxes(0, 1)  # [N, T, nope + rope]

    def attend(w, state):
        latent, k_rope = jnp.split(pages[page_ids[w]], [rank], axis=-1)  # [s, rank], [s, rope]
        k_nope = jnp.einsum("sr,ndr->nsd", latent, w_key)
        values = jnp.einsum("sr,ndr->nsd", latent, w_value)
        k_rope = jnp.broadcast_to(k_rope, (num_heads, *k_rope.shape))
        keys = jnp.concatenate((k_nope, k_rope), axis=-1)
        scores = jnp.einsum("ntd,nsd->nts", q, keys, preferred_element_type=f32)
        position = page_start[w] + jnp.arange(page_size, dtype=jnp.int32)
        visible = (position[None, :] <= positions[:, None]) & (
            (request == page_request[w]) & (request >= 0)
        )[:, None]
        return _accumulate(
            state,
            scores * scale,
            visible[None, :, :],
            lambda p: jnp.einsum(
                "nts,nsd->ntd", p.astype(values.dtype), _finite(values), preferred_element_type=f32
            ),
        )

    axes = varying_axes(
        q, pages, w_key, w_value, positions, request, page_ids, page_request, page_start
    )
    start = _start((num_heads, num_tokens), v_dim, axes)
    state = jax.lax.fori_loop(0, num_pages, attend, start)
    return _result(state).swapaxes(0, 1).astype(q_nope.dtype)


def mla_decode(
    q_latent: Float[Array, "B N rank"],
    q_rope: Float[Array, "B N rope"],
    pages: Float[Array, "pages page_size latent"],
    *,
    page_table: Int32[Array, "B W"],
    lengths: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B N rank"]:
    batch, num_heads, rank = q_latent.shape
    page_size = pages.shape[1]
    f32 = jnp.float32
    q = jnp.concatenate((q_latent, q_rope), axis=-1)

    def attend(w, state):
        entries = pages[page_table[:, w]]  # [B, s, latent]
        scores = jnp.einsum("bnd,bsd->bns", q, entries, preferred_element_type=f32)
        position = w * page_size + jnp.arange(page_size, dtype=jnp.int32)
        return _accumulate(
            state,
            scores * scale,
            position[None, None, :] < lengths[:, None, None],
            lambda p: jnp.einsum(
                "bns,bsd->bnd",
                p.astype(entries.dtype),
                _finite(entries),
                preferred_element_type=f32,
            ),
        )

    num_pages = (jnp.max(lengths) + page_size - 1) // page_size
    # The rotated keys are weighed along with the latents and cut off here: cheaper than copying
    # the latents out of every page.
    axes = varying_axes(q, pages, page_table, lengths)
    start = _start((batch, num_heads), q.shape[-1], axes)
    state = jax.lax.fori_loop(0, num_pages, attend, start)
    return _result(state)[..., :rank].astype(q_latent.dtype)


def _start(rows: tuple[int, int], features: int, axes: frozenset[str]):
    """No page seen: maximum score, sum of weights and weighted sum of each row."""
    state = (
        jnp.full((*rows, 1), MASKED, jnp.float32),
        jnp.zeros((*rows, 1), jnp.float32),
        jnp.zeros((*rows, features), jnp.float32),
    )
    return tuple(as_varying(part, axes) for part in state)


def _accumulate(state, scores, visible, weigh):
    """Take in one page: `weigh(p)` sums the page's values with weights p, [*rows, s]."""
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


def _finite(values):
    """Zero for what is not a number. Through the scores it reaches every row that sees it; the
    others weigh it by zero, which would still make it their NaN."""
    return jnp.where(jnp.isfinite(values), values, jnp.zeros((), values.dtype))


def _result(state):
    _, total, weighted = state
    return weighted / jnp.where(total > 0, total, 1.0)
