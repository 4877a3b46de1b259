"""The training forward of a DeepSeek-V3 model, as functions of a flat dict of parameters.

A parameter's key is its path in the serving model, which is its Hugging Face name; a layer's
experts are stacked, as the serving model stacks them. The multi-token-prediction (MTP) layer is
layer `num_hidden_layers`, as in DeepSeek's checkpoints. The routers' `e_score_correction_bias` is
not among the parameters: it is learned outside the gradient and passed in by itself, a row for each
router, the MTP layer's last.

Differences from the serving forward, none of which changes a number beyond rounding:

- attention is within the documents of packed rows and has no cache;
- every expert computes every token, as one wide gated MLP, and the routing weights, zero for most,
  multiply its activations: at 32 narrow experts two big matmuls beat moving tokens, and none is
  dropped;
- matmuls are in `dtype`, and so are their gradients. Serving's `Linear` asks for a float32 result,
  whose transpose would be a matmul of float32 by bfloat16, at half the speed or less.

What is trained in float32: master weights, routers, softmax and loss.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxmoe.checkpoint.parameters import list_parameters
from jaxmoe.config import ModelConfig
from jaxmoe.model.mla import LATENT_NORM_EPS
from jaxmoe.model.rope import Rotation, apply_rope, rotation


Parameters = dict[str, jax.Array]

CORRECTION_BIAS = "e_score_correction_bias"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INIT_STD = 0.02  # of embeddings and routers
MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """Rows of documents one after the other.

    Attributes:
      tokens: one more than the positions, so that the last one has a target.
      weights: of the prediction of tokens[:, 1:]; 0 where it is not to be learned.
      positions: of tokens[:, :-1] in their documents.
      segment_ids: which document of its row a token belongs to; 0 is padding.
    """

    tokens: Int32[Array, "B S1"]
    weights: Float32[Array, "B S"]
    positions: Int32[Array, "B S"]
    segment_ids: Int32[Array, "B S"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """Attributes:
    hidden: normalised last hidden states; position t predicts token t + 1.
    mtp_hidden: the same of the MTP layer, whose position t predicts token t + 2; None without one.
    expert_load: tokens that went to each expert of each router.
    balance_loss: the sequence-wise one, averaged over routers and rows.
    """

    hidden: Float[Array, "T H"]
    mtp_hidden: Float[Array, "T H"] | None
    expert_load: Float32[Array, "R E"]
    balance_loss: Float32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Of one batch. `loss` is the main model's cross-entropy alone, accuracies are of the most
    likely token."""

    loss: Float32[Array, ""]
    mtp_loss: Float32[Array, ""]
    accuracy: Float32[Array, ""]
    mtp_accuracy: Float32[Array, ""]
    balance_loss: Float32[Array, ""]
    expert_load: Float32[Array, "R E"]


def parameter_shapes(config: ModelConfig, *, has_mtp: bool) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trained parameter; the serving model's own list, and the MTP layer.

    The MTP layer shares embedding and head with the model, so it has neither here.
    """
    shapes = {
        parameter.name: parameter.shape
        for parameter in list_parameters(config, config.n_routed_experts, np.float32)
        if not parameter.name.endswith(CORRECTION_BIAS)
    }
    if has_mtp:
        hidden = config.hidden_size
        last, mtp = (layer_prefix(config.num_hidden_layers - back) for back in (1, 0))
        shapes |= {
            mtp + name.removeprefix(last): shape
            for name, shape in shapes.items()
            if name.startswith(last)
        }
        shapes |= {mtp + f"{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        shapes[mtp + "eh_proj.weight"] = (hidden, 2 * hidden)
        shapes[mtp + "shared_head.norm.weight"] = (hidden,)
    return shapes


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def has_mtp(params: Mapping[str, jax.Array]) -> bool:
    return any(name.endswith(".eh_proj.weight") for name in params)


def num_routers(config: ModelConfig, *, has_mtp: bool) -> int:
    return config.num_moe_layers + has_mtp


def initialise(config: ModelConfig, seed: int, *, has_mtp: bool) -> Parameters:
    """Float32 parameters. Matrices keep the variance of what they multiply; those that write to
    the residual stream are smaller by the root of how many do."""
    generator = np.random.default_rng(seed)
    residual_scale = (2 * config.num_hidden_layers) ** -0.5
    params = {}
    for name, shape in parameter_shapes(config, has_mtp=has_mtp).items():
        if "norm" in name:
            values = np.ones(shape, np.float32)
        else:
            values = generator.standard_normal(shape, np.float32)
            if name in (EMBEDDING, HEAD) or name.endswith("mlp.gate.weight"):
                values *= INIT_STD
            else:
                values *= shape[-1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                values *= residual_scale
        params[name] = jnp.asarray(values)
    return params


def forward(
    params: Parameters,
    correction_bias: Float32[Array, "R E"],
    batch: PackedBatch,
    *,
    config: ModelConfig,
    dtype: DTypeLike,
) -> Outputs:
    """Hidden states of every position, of the model and of its MTP layer."""
    run_layer = partial(
        _decoder_layer,
        is_token=batch.segment_ids > 0,
        segment_ids=batch.segment_ids,
        rotate=rotation(batch.positions.reshape(-1), config),
        config=config,
    )
    x = _embed(params[EMBEDDING], batch.tokens[:, :-1].reshape(-1), dtype)
    routed = []
    for layer in range(config.num_hidden_layers):
        with jax.named_scope(f"layer_{layer}"):
            router = layer - config.first_k_dense_replace
            bias = correction_bias[router] if router >= 0 else None
            x, balance = run_layer(_subtree(params, layer_prefix(layer)), bias, x)
            if balance is not None:
                routed.append(balance)
    hidden = _rms_norm(x, params["model.norm.weight"], config.rms_norm_eps)
    mtp_hidden = None
    if has_mtp(params):
        with jax.named_scope("mtp"):
            layer = _subtree(params, layer_prefix(config.num_hidden_layers))
            # Token t + 1 beside the hidden state of position t, in this order, and the hidden state
            # after the final norm: as the servers of DeepSeek-V3 run the published weights.
            ahead = _embed(params[EMBEDDING], batch.tokens[:, 1:].reshape(-1), dtype)
            eps = config.rms_norm_eps
            joined = jnp.concatenate(
                (
                    _rms_norm(ahead, layer["enorm.weight"], eps),
                    _rms_norm(hidden, layer["hnorm.weight"], eps),
                ),
                axis=-1,
            )
            x = _dense(joined, layer["eh_proj.weight"])
            x, balance = run_layer(layer, correction_bias[-1], x)
            assert balance is not None  # the last layer's kind, which has experts
            routed.append(balance)
            mtp_hidden = _rms_norm(x, layer["shared_head.norm.weight"], eps)
    return Outputs(
        hidden=hidden,
        mtp_hidden=mtp_hidden,
        expert_load=jnp.stack([load for load, _ in routed]),
        balance_loss=jnp.stack([loss for _, loss in routed]).mean(),
    )


def logits(params: Parameters, hidden: Float[Array, "T H"]) -> Float32[Array, "T V"]:
    """In float32, as the serving model makes them."""
    return _logits(hidden, _head(params).astype(hidden.dtype))


def loss(
    params: Parameters,
    correction_bias: Float32[Array, "R E"],
    batch: PackedBatch,
    *,
    config: ModelConfig,
    dtype: DTypeLike,
    mtp_weight: float,
    balance_weight: float,
    z_weight: float,
) -> tuple[Float32[Array, ""], Metrics]:
    """What is minimised, and what to report.

    The sum of next-token cross-entropy, `mtp_weight` times that of the token after it,
    `balance_weight` times the sequence-wise balance loss, and inside the cross-entropies
    `z_weight` times the square of log Z.
    """
    outputs = forward(params, correction_bias, batch, config=config, dtype=dtype)
    main, accuracy = _mean_cross_entropy(
        outputs.hidden, _head(params), batch.tokens[:, 1:], batch.weights, z_weight
    )
    zero = jnp.zeros((), jnp.float32)
    mtp, mtp_accuracy = zero, zero
    if outputs.mtp_hidden is not None:
        targets, weights = mtp_targets(batch)
        mtp, mtp_accuracy = _mean_cross_entropy(
            outputs.mtp_hidden, _head(params), targets, weights, z_weight
        )
    total = main + mtp_weight * mtp + balance_weight * outputs.balance_loss
    return total, Metrics(
        loss=main,
        mtp_loss=mtp,
        accuracy=accuracy,
        mtp_accuracy=mtp_accuracy,
        balance_loss=outputs.balance_loss,
        expert_load=outputs.expert_load,
    )


def mtp_targets(batch: PackedBatch) -> tuple[Int32[Array, "B S"], Float32[Array, "B S"]]:
    """Token t + 2 of each position, and the weight of predicting it: that of predicting it from
    t + 1, unless t + 1 is in another document. The last position has no such token."""
    targets = jnp.pad(batch.tokens[:, 2:], ((0, 0), (0, 1)))
    same = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    weights = jnp.where(same, batch.weights[:, 1:], 0.0)
    return targets, jnp.pad(weights, ((0, 0), (0, 1)))


def route(
    scores: Float32[Array, "T E"], correction_bias: Float32[Array, " E"], config: ModelConfig
) -> Float32[Array, "T E"]:
    """`route_v3` as a dense matrix: the weight of every expert, 0 for those not chosen.

    Choices by counting what is better instead of sorting: over 32 experts that is one fused
    reduction, and neither a gather nor its transposed scatter.
    """
    num_tokens, num_experts = scores.shape
    choice = jax.lax.stop_gradient(scores) + correction_bias[None, :]
    grouped = choice.reshape(num_tokens, config.n_group, -1)
    group_scores = jnp.where(_is_among_best(grouped, 2), grouped, 0.0).sum(-1)
    is_kept = _is_among_best(group_scores, config.topk_group)
    limited = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)
    weights = jnp.where(_is_among_best(limited, config.num_experts_per_tok), scores, 0.0)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling_factor


def _is_among_best(x: Float32[Array, "*T n"], k: int) -> Bool[Array, "*T n"]:
    """Of the last axis; equal values in order, as `top_k` takes them."""
    mine, others = x[..., :, None], x[..., None, :]
    order = jnp.arange(x.shape[-1])
    is_before = order[:, None] > order[None, :]  # [mine, others]
    is_before = is_before.reshape((1,) * (x.ndim - 1) + is_before.shape)
    return ((others > mine) | ((others == mine) & is_before)).sum(-1) < k


def _decoder_layer(layer, correction_bias, x, *, is_token, segment_ids, rotate, config):
    eps = config.rms_norm_eps
    with jax.named_scope("attention"):
        normed = _rms_norm(x, layer["input_layernorm.weight"], eps)
        x = x + _attention(_subtree(layer, "self_attn."), normed, segment_ids, rotate, config)
    normed = _rms_norm(x, layer["post_attention_layernorm.weight"], eps)
    mlp = _subtree(layer, "mlp.")
    with jax.named_scope("mlp"):
        if correction_bias is None:
            return x + _mlp(mlp, normed), None
        y, balance = _moe(mlp, correction_bias, normed, is_token, config)
        return x + y, balance


def _attention(weights, x, segment_ids, rotate: Rotation, config: ModelConfig):
    batch, length = segment_ids.shape
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    num_tokens = batch * length

    if config.q_lora_rank is None:
        q = _dense(x, weights["q_proj.weight"])
    else:
        q = _dense(x, weights["q_a_proj.weight"], weights.get("q_a_proj.bias"))
        q = _rms_norm(q, weights["q_a_layernorm.weight"], LATENT_NORM_EPS)
        q = _dense(q, weights["q_b_proj.weight"])
    q_nope, q_rope = jnp.split(q.reshape(num_tokens, heads, -1), [nope], axis=-1)
    q = jnp.concatenate((q_nope, apply_rope(q_rope, rotate)), axis=-1)

    latent = _dense(x, weights["kv_a_proj_with_mqa.weight"], weights.get("kv_a_proj_with_mqa.bias"))
    latent, k_rope = jnp.split(latent, [rank], axis=-1)
    latent = _rms_norm(latent, weights["kv_a_layernorm.weight"], LATENT_NORM_EPS)
    expanded = _dense(latent, weights["kv_b_proj.weight"]).reshape(num_tokens, heads, -1)
    k_nope, v = jnp.split(expanded, [nope], axis=-1)
    k_rope = jnp.broadcast_to(
        apply_rope(k_rope, rotate)[:, None, :], (num_tokens, heads, k_rope.shape[-1])
    )
    k = jnp.concatenate((k_nope, k_rope), axis=-1)

    q, k, v = (a.reshape(batch, length, heads, -1) for a in (q, k, v))
    attended = _attend(config.softmax_scale, q, k, v, segment_ids)
    attended = attended.reshape(num_tokens, -1)
    return _dense(attended, weights["o_proj.weight"], weights.get("o_proj.bias"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q, k, v, segment_ids):
    """Causal softmax attention within segments; q, k [B, S, N, D], v [B, S, N, d].

    The gradient is written out so that it recomputes the probabilities instead of keeping them, and
    multiplies in the dtype of q (see the module docstring).
    """
    return _attend_forward(scale, q, k, v, segment_ids)[0]


def _attend_forward(scale, q, k, v, segment_ids):
    scores = _masked_scores(scale, q, k, segment_ids)
    log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    probabilities = jnp.exp(scores - log_z).astype(q.dtype)
    out = jnp.einsum("bnqk,bknd->bqnd", probabilities, v)
    return out, (q, k, v, segment_ids, log_z, out)


def _attend_backward(scale, saved, g):
    q, k, v, segment_ids, log_z, out = saved
    probabilities = jnp.exp(_masked_scores(scale, q, k, segment_ids) - log_z)
    dv = jnp.einsum("bnqk,bqnd->bknd", probabilities.astype(q.dtype), g)
    dp = jnp.einsum("bqnd,bknd->bnqk", g, v, preferred_element_type=jnp.float32)
    expected = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    expected = expected.transpose(0, 2, 1)[..., None]  # [B, N, S, 1]
    ds = (probabilities * (dp - expected) * scale).astype(q.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", ds, k), jnp.einsum("bnqk,bqnd->bknd", ds, q), dv, None


_attend.defvjp(_attend_forward, _attend_backward)


def _masked_scores(scale, q, k, segment_ids) -> Float32[Array, "B N S S"]:
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) * scale
    order = jnp.arange(q.shape[1])
    is_visible = segment_ids[:, :, None] == segment_ids[:, None, :]
    is_visible &= (order[:, None] >= order[None, :])[None]
    return jnp.where(is_visible[:, None], scores, MASKED)


def _mlp(weights, x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    gate, up = (_dense(x, weights[f"{name}_proj.weight"]) for name in ("gate", "up"))
    return _dense(jax.nn.silu(gate) * up, weights["down_proj.weight"])


def _moe(weights, correction_bias, x, is_token, config: ModelConfig):
    """The layer's output, each expert's load and the balance loss."""
    num_tokens, hidden = x.shape
    num_experts, width = config.n_routed_experts, config.moe_intermediate_size
    router_logits = jnp.matmul(
        x.astype(jnp.float32), weights["gate.weight"].T, precision=jax.lax.Precision.HIGHEST
    )
    scores = jax.nn.sigmoid(router_logits)
    routing = route(scores, correction_bias, config)

    gate_up = weights["experts.gate_up_proj"].reshape(num_experts * 2 * width, hidden)
    activated = _gated(_dense(x, gate_up).reshape(num_tokens, num_experts, 2, width), routing)
    down = weights["experts.down_proj"].astype(x.dtype)
    y = jnp.einsum("tef,ehf->th", activated, down)

    shared = _mlp(_subtree(weights, "shared_experts."), x)
    chosen = ((routing > 0) & is_token.reshape(-1)[:, None]).astype(jnp.float32)
    return y + shared, (chosen.sum(0), _balance_loss(scores, chosen, is_token, config))


@jax.checkpoint
def _gated(gate_up: Float[Array, "T E 2 F"], routing: Float32[Array, "T E"]):
    """The experts' activations times the routing weights; recomputed in the backward pass, which
    reads less than the saved intermediates would be."""
    gate, up = gate_up[:, :, 0], gate_up[:, :, 1]
    activated = (jax.nn.silu(gate) * up).astype(jnp.float32) * routing[:, :, None]
    return activated.astype(gate_up.dtype)


def _balance_loss(scores, chosen, is_token, config: ModelConfig) -> Float32[Array, ""]:
    """The sequence-wise balance loss of arXiv:2412.19437, section 2.1.2; a row is a sequence."""
    num_rows, _ = is_token.shape
    num_experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    mask = is_token.astype(jnp.float32)
    num_tokens = jnp.maximum(mask.sum(1), 1)[:, None]
    share = scores / (scores.sum(-1, keepdims=True) + 1e-20) * mask.reshape(-1)[:, None]
    share = share.reshape(num_rows, -1, num_experts).sum(1) / num_tokens
    load = chosen.reshape(num_rows, -1, num_experts).sum(1) / num_tokens * (num_experts / top_k)
    return (share * load).sum(-1).mean()


def _mean_cross_entropy(hidden, head, targets, weights, z_weight):
    """Weighted means of the cross-entropy and of being right."""
    losses, is_right = _cross_entropy(z_weight, hidden, head, targets.reshape(-1))
    weights = weights.reshape(-1)
    weights = weights / jnp.maximum(weights.sum(), 1e-6)
    return (losses * weights).sum(), (is_right * weights).sum()


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(z_weight, hidden, head, targets):
    """Of each token, with the head's matmul inside so that logits are recomputed, not kept."""
    return _cross_entropy_forward(z_weight, hidden, head, targets)[0]


def _cross_entropy_forward(z_weight, hidden, head, targets):
    scores = _logits(hidden, head.astype(hidden.dtype))
    log_z = jax.nn.logsumexp(scores, axis=-1)
    is_target = _one_hot(targets, head.shape[0])
    right = jnp.where(is_target, scores, 0.0).sum(-1)
    is_right = (right >= scores.max(-1)).astype(jnp.float32)
    losses = log_z - right + z_weight * log_z**2
    return (losses, is_right), (hidden, head, targets, log_z)


def _cross_entropy_backward(z_weight, saved, gradients):
    hidden, head, targets, log_z = saved
    g = gradients[0]
    weight = head.astype(hidden.dtype)
    probabilities = jnp.exp(_logits(hidden, weight) - log_z[:, None])
    is_target = _one_hot(targets, head.shape[0])
    d_scores = probabilities * (1 + 2 * z_weight * log_z)[:, None] - is_target.astype(jnp.float32)
    d_scores = (d_scores * g[:, None]).astype(hidden.dtype)
    d_head = jnp.einsum("tv,th->vh", d_scores, hidden, preferred_element_type=jnp.float32)
    return d_scores @ weight, d_head.astype(head.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embed(weight, ids, dtype):
    """Rows of the embedding in `dtype`. The gradient is a matmul instead of a scatter: faster with
    few rows and many tokens, and the same from run to run."""
    return weight[ids].astype(dtype)


def _embed_forward(weight, ids, dtype):
    return _embed(weight, ids, dtype), (weight, ids)


def _embed_backward(dtype, saved, g):
    weight, ids = saved
    is_id = _one_hot(ids, weight.shape[0]).astype(g.dtype)
    d_weight = jnp.einsum("tv,th->vh", is_id, g, preferred_element_type=jnp.float32)
    return d_weight.astype(weight.dtype), None


_embed.defvjp(_embed_forward, _embed_backward)


def _one_hot(ids: Int32[Array, " T"], num: int) -> Bool[Array, "T n"]:
    return ids[:, None] == jnp.arange(num, dtype=ids.dtype)[None, :]


def _logits(hidden: Float[Array, "T H"], head: Float[Array, "V H"]) -> Float32[Array, "T V"]:
    return jnp.einsum("th,vh->tv", hidden, head, preferred_element_type=jnp.float32)


def _head(params: Parameters) -> jax.Array:
    return params[HEAD] if HEAD in params else params[EMBEDDING]


def _dense(x: Float[Array, "T i"], weight: Float[Array, "o i"], bias=None) -> Float[Array, "T o"]:
    y = jnp.einsum("ti,oi->to", x, weight.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)[None, :]


def _rms_norm(x: Float[Array, "T H"], weight: Float[Array, " H"], eps: float):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype)[None, :] * x32.astype(x.dtype)


def _subtree(tree: Mapping[str, jax.Array], prefix: str) -> Parameters:
    return {
        name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)
    }
