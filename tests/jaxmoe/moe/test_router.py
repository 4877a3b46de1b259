"""The routers against a plain reading of their definitions in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.moe.router import route_v2, route_v3


def best(scores, count):
    """Indices of the `count` largest, largest first; the lower index wins a tie."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def want_v3(logits, bias, n_group, topk_group, top_k, norm):
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    choice = scores + bias
    groups = np.split(choice, n_group)
    kept = best([np.sort(group)[-2:].sum() for group in groups], topk_group)
    size = len(groups[0])
    allowed = [g * size + i for g in kept for i in range(size)]
    masked = np.full_like(choice, -np.inf)
    masked[allowed] = choice[allowed]
    idx = best(masked, top_k)
    weights = scores[idx]
    return idx, weights / weights.sum() if norm else weights


def want_v2(logits, n_group, topk_group, top_k):
    scores = np.exp(logits.astype(np.float64) - logits.max())
    scores /= scores.sum()
    groups = np.split(scores, n_group)
    kept = best([group.max() for group in groups], topk_group)
    size = len(groups[0])
    masked = np.zeros_like(scores)
    for g in kept:
        masked[g * size : (g + 1) * size] = groups[g]
    idx = best(masked, top_k)
    return idx, scores[idx]


@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group", "top_k", "norm"),
    [(32, 8, 4, 4, True), (16, 4, 1, 4, True), (16, 1, 1, 3, False), (8, 4, 4, 8, True)],
)
def test_v3(experts, n_group, topk_group, top_k, norm):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, experts)).astype(np.float32) * 2
    bias = rng.standard_normal(experts).astype(np.float32) * 0.3
    idx, weights = route_v3(
        jnp.asarray(logits),
        jnp.asarray(bias),
        n_group=n_group,
        topk_group=topk_group,
        top_k=top_k,
        norm_topk_prob=norm,
    )
    for row in range(200):
        want_idx, want_weights = want_v3(logits[row], bias, n_group, topk_group, top_k, norm)
        assert idx[row].tolist() == want_idx
        np.testing.assert_allclose(weights[row], want_weights, rtol=1e-5)


def test_v3_bias_chooses_but_does_not_weigh():
    logits = jnp.zeros((1, 4))
    bias = jnp.asarray([0.0, 5.0, 0.0, 3.0])
    idx, weights = route_v3(logits, bias, n_group=1, topk_group=1, top_k=2, norm_topk_prob=False)
    assert idx.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("n_group", "topk_group", "top_k"), [(1, 1, 4), (4, 2, 4), (8, 3, 6)])
def test_v2(n_group, topk_group, top_k):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((200, 32)).astype(np.float32) * 2
    idx, weights = route_v2(
        jnp.asarray(logits), n_group=n_group, topk_group=topk_group, top_k=top_k
    )
    for row in range(200):
        want_idx, want_weights = want_v2(logits[row], n_group, topk_group, top_k)
        assert idx[row].tolist() == want_idx
        np.testing.assert_allclose(weights[row], want_weights, rtol=1e-5)
