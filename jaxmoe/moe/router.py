"""Which experts a token goes to. Scores are computed in float32 whatever the model's dtype.

V2 (arXiv:2405.04434): softmax scores, groups limited by their best expert. V3 (arXiv:2412.19437):
sigmoid scores; a learned correction bias takes part in the choice and not in the weights; groups
are limited by the sum of their two best choices.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32

from custom_calls.gemm import gemm
from jaxmoe.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts of each token and their weights.

    Logical experts as the router returns it, physical ones after `ExpertPlacement.to_physical`;
    -1 is none.
    """

    topk_idx: Int32[Array, "T K"]
    topk_weights: Float32[Array, "T K"]


class Router(nnx.Module):
    def __init__(self, config: ModelConfig):
        self.config = config
        shape = (config.n_routed_experts, config.hidden_size)
        self.weight = nnx.Param(jnp.zeros(shape, jnp.float32))
        if config.model_type == "deepseek_v3":
            self.e_score_correction_bias = nnx.Param(
                jnp.zeros((config.n_routed_experts,), jnp.float32)
            )

    def __call__(self, x: Float[Array, "T H"], is_token: Bool[Array, " T"]) -> Routing:
        """Route the tokens of one rank; padding goes to no expert."""
        logits = gemm(x.astype(jnp.float32), self.weight[...])
        config = self.config
        limits = dict(
            n_group=config.n_group, topk_group=config.topk_group, top_k=config.num_experts_per_tok
        )
        if config.model_type == "deepseek_v3":
            topk_idx, weights = route_v3(
                logits,
                self.e_score_correction_bias[...],
                norm_topk_prob=config.norm_topk_prob,
                **limits,
            )
        else:
            topk_idx, weights = route_v2(logits, **limits)
        return Routing(
            topk_idx=jnp.where(is_token[:, None], topk_idx, -1),
            topk_weights=weights * config.routed_scaling_factor,
        )


def route_v3(
    logits: Float32[Array, "T E"],
    correction_bias: Float32[Array, " E"],
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"]]:
    """The V3 router's experts and unscaled weights."""
    scores = jax.nn.sigmoid(logits)
    choice = scores + correction_bias[None, :]
    best_two, _ = jax.lax.top_k(_grouped(choice, n_group), 2)
    choice = _limit_groups(choice, best_two.sum(-1), topk_group, masked=-jnp.inf)
    _, topk_idx = jax.lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, topk_idx, axis=-1)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return topk_idx, weights


def route_v2(
    logits: Float32[Array, "T E"], *, n_group: int, topk_group: int, top_k: int
) -> tuple[Int32[Array, "T K"], Float32[Array, "T K"]]:
    """The V2 router's experts and unscaled weights; one group means no limit."""
    scores = jax.nn.softmax(logits, axis=-1)
    if n_group > 1:
        best = _grouped(scores, n_group).max(-1)
        scores = _limit_groups(scores, best, topk_group, masked=0.0)
    weights, topk_idx = jax.lax.top_k(scores, top_k)
    return topk_idx, weights


def _grouped(scores: Array, n_group: int) -> Array:
    return scores.reshape(scores.shape[0], n_group, -1)


def _limit_groups(scores: Array, group_scores: Array, topk_group: int, *, masked: float) -> Array:
    """`scores` with the experts of all but the `topk_group` best groups masked."""
    num_tokens, n_group = group_scores.shape
    _, kept = jax.lax.top_k(group_scores, topk_group)
    is_kept = (kept[:, :, None] == jnp.arange(n_group, dtype=kept.dtype)[None, None, :]).any(1)
    grouped = _grouped(scores, n_group)
    return jnp.where(is_kept[:, :, None], grouped, masked).reshape(num_tokens, -1)
