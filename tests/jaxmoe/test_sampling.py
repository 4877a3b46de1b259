import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import sampling


VOCAB = 12
DRAWS = 20_000

sample = jax.jit(sampling.sample)


def batch(rows, **changes):
    """A greedy batch of one rank (local view) with some columns changed."""
    local = jax.tree.map(lambda x: x[0], sampling.greedy_batch(1, rows))
    columns = {
        name: np.broadcast_to(
            np.asarray(value, getattr(local, name).dtype), getattr(local, name).shape
        )
        for name, value in changes.items()
    }
    return dataclasses.replace(local, **columns)


def make_logits(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, VOCAB)).astype(np.float32) * 2


def draw(logits, count, **changes):
    """`count` independent draws from one row of logits."""
    rows = np.broadcast_to(logits, (count, VOCAB))
    positions = np.arange(count)
    sampled = sample(
        rows, batch(count, **({"temperature": 1.0, "position": positions} | changes)), None
    )
    return np.asarray(sampled.token_ids)


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution to sample from, in float64."""
    z = logits.astype(np.float64) / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(VOCAB, bool)
    total = 0.0
    for rank, token in enumerate(order):
        enough = (top_k and rank >= top_k) or total >= top_p or p[token] < min_p * p.max()
        if rank > 0 and enough:
            break
        kept[token] = True
        total += p[token]
    return np.where(kept, p, 0) / p[kept].sum()


def test_greedy_takes_the_largest_and_scores_it():
    logits = make_logits(6)
    sampled = sample(logits, batch(6), None)
    np.testing.assert_array_equal(sampled.token_ids, logits.argmax(-1))
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(sampled.logprobs, logprobs.max(-1), rtol=1e-5)
    assert (np.asarray(sampled.top_logprobs) == 0).all()  # nobody asked


def test_top_logprobs_are_sorted_and_the_models_own():
    logits = make_logits(3)
    bias = np.zeros_like(logits)
    bias[:, 0] = 100
    sampled = sample(logits, batch(3, num_top_logprobs=[0, 4, 0], temperature=3.0), bias)
    assert (np.asarray(sampled.token_ids) == 0).all()
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(sampled.top_logprobs, -np.sort(-logprobs)[:, :20], rtol=1e-5)
    np.testing.assert_array_equal(sampled.top_ids, np.argsort(-logprobs, kind="stable")[:, :20])
    np.testing.assert_allclose(sampled.logprobs, logprobs[:, 0], rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 1e-9},
    ],
)
def test_draws_follow_the_truncated_distribution(rule):
    logits, count = make_logits(1, seed=3)[0], DRAWS
    drawn = np.bincount(draw(logits, count, **rule), minlength=VOCAB)
    want = truncated(logits, **rule)
    assert (drawn[want == 0] == 0).all()
    # Five standard deviations of each token's count.
    assert (np.abs(drawn - count * want) <= 5 * np.sqrt(count * want * (1 - want)) + 1e-6).all()


def test_a_seed_gives_the_same_token_anywhere_in_any_batch():
    logits = make_logits(1, seed=5)[0]
    seeds = [(7, 0), (8, 0), (7, 1)]
    alone = [draw(logits, 1, seed=[seed], position=4)[0] for seed in seeds]
    together = draw(logits, 6, seed=[*reversed(seeds), *seeds], position=4, temperature=1.0)
    np.testing.assert_array_equal(together, [*reversed(alone), *alone])
    many = draw(logits, DRAWS, seed=(9, 9))[:200]
    assert len(set(many.tolist())) > 3  # positions differ, so do the draws


def test_rows_mix_greedy_and_sampled():
    logits = make_logits(6)
    sampled = sample(logits, batch(6, temperature=[0.0, 1.0] * 3), None)
    np.testing.assert_array_equal(sampled.token_ids[::2], logits[::2].argmax(-1))


def test_infinite_bias_forbids_a_token():
    logits = make_logits(1)
    bias = np.zeros_like(logits)
    bias[0, logits.argmax()] = -1e9
    sampled = sample(logits, batch(1, temperature=1.0, top_k=1), bias)
    assert sampled.token_ids[0] == np.argsort(-logits[0])[1]


def test_score_matches_log_softmax():
    logits = make_logits(4)
    ids = jnp.asarray([0, 3, 11, 5], jnp.int32)
    logprob, _, _ = sampling.score(logits, ids, with_top=jnp.asarray(False))
    want = jax.nn.log_softmax(logits)[np.arange(4), ids]
    np.testing.assert_allclose(logprob, want, rtol=1e-5)
