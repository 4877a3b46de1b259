"""From hidden states to tokens. Local shapes: each rank samples its own requests.

Every row draws from its own random stream, a function of the request's seed and the token's
position alone: the same seed gives the same tokens whatever else is in the batch.

Log-probabilities are the model's own: before bias, penalties, temperature and truncation.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32


MAX_TOP_LOGPROBS = 20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """How each row is sampled. Filled in by the host as numpy arrays.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities reach top_p; 1 keeps all.
      min_p: drop tokens less likely than min_p times the most likely; 0 keeps all.
      seed: low and high word of the request's seed.
      position: index of the token being sampled in its sequence.
      num_top_logprobs: how many alternatives the request wants, at most `MAX_TOP_LOGPROBS`. If no
        row wants any, none are computed.
    """

    temperature: Float32[Any, "*D B"]
    top_k: Int32[Any, "*D B"]
    top_p: Float32[Any, "*D B"]
    min_p: Float32[Any, "*D B"]
    seed: UInt32[Any, "*D B 2"]
    position: Int32[Any, "*D B"]
    num_top_logprobs: Int32[Any, "*D B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """One token a row with its log-probability, and the most likely tokens with theirs (zeros when
    no row asked for them)."""

    token_ids: Int32[Array, "*D B"]
    logprobs: Float32[Array, "*D B"]
    top_ids: Int32[Array, "*D B k"]
    top_logprobs: Float32[Array, "*D B k"]


def greedy_batch(num_ranks: int, batch_size: int) -> SamplingBatch:
    """A batch of numpy arrays in which every row takes the most likely token, for the host to
    fill in."""
    rows = (num_ranks, batch_size)
    return SamplingBatch(
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros((*rows, 2), np.uint32),
        position=np.zeros(rows, np.int32),
        num_top_logprobs=np.zeros(rows, np.int32),
    )


def sample(
    logits: Float32[Array, "B V"],
    sampling: SamplingBatch,
    bias: Float32[Array, "B V"] | None,
) -> Sampled:
    """One token for each row; `bias` (logit bias and penalties) is added for the choice only."""
    chosen_from = logits if bias is None else logits + bias
    greedy = jnp.argmax(chosen_from, axis=-1).astype(jnp.int32)
    token_ids = jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: jnp.where(sampling.temperature > 0, _draw(chosen_from, sampling), greedy),
        lambda: greedy,
    )
    logprobs, top_ids, top_logprobs = score(
        logits, token_ids, with_top=jnp.any(sampling.num_top_logprobs > 0)
    )
    return Sampled(token_ids, logprobs, top_ids, top_logprobs)


def score(
    logits: Float32[Array, "B V"], token_ids: Int32[Array, " B"], *, with_top: Array
) -> tuple[Float32[Array, " B"], Int32[Array, "B k"], Float32[Array, "B k"]]:
    """Log-probability of each row's token, the most likely tokens and theirs (if `with_top`)."""
    rows, vocab = logits.shape
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0] - normaliser
    k = min(MAX_TOP_LOGPROBS, vocab)

    def top():
        values, ids = jax.lax.top_k(logits, k)
        return ids.astype(jnp.int32), values - normaliser[:, None]

    def nothing():
        return jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k), jnp.float32)

    top_ids, top_logprobs = jax.lax.cond(with_top, top, nothing)
    return chosen, top_ids, top_logprobs


def _draw(logits: Float[Array, "B V"], sampling: SamplingBatch) -> Int32[Array, " B"]:
    """Sample the truncated distribution by the Gumbel-max method."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
    vocab = logits.shape[-1]
    index = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)[:, None]
    before = jnp.cumsum(ranked, axis=-1) - ranked
    kept = (index < top_k) & (before < sampling.top_p[:, None])
    kept &= ranked >= sampling.min_p[:, None] * ranked[:, :1]
    kept |= index == 0  # the most likely token always stays
    noise = jax.vmap(_row_noise, in_axes=(0, 0, None))(sampling.seed, sampling.position, vocab)
    # Noise belongs to a token, not to its place in the order, so ties cannot move it.
    noise = jnp.take_along_axis(noise, order, axis=-1)
    best = jnp.argmax(jnp.where(kept, jnp.log(ranked) + noise, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _row_noise(
    seed: UInt32[Array, "2"], position: Int32[Array, ""], vocab: int
) -> Float32[Array, " V"]:
    key = jax.random.key(0)
    for word in (seed[0], seed[1], position):
        key = jax.random.fold_in(key, word)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
