"""The decoder. Local shapes: the model runs inside `shard_map`, one rank's batch at a time.

The module tree mirrors Hugging Face's parameter names, so a parameter's path is its checkpoint
name (experts excepted, which are stored by physical slot).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from custom_calls.gemm import gemm
from jaxmoe.batch import Batch
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.kv_cache import KVCache
from jaxmoe.model.linear import Embedding, Linear
from jaxmoe.model.mla import MultiHeadLatentAttention
from jaxmoe.model.mlp import MLP
from jaxmoe.model.norm import RMSNorm
from jaxmoe.model.rope import rotation
from jaxmoe.moe.layer import MoE
from jaxmoe.plan import ExecutionPlan, Quantization


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activations:
    """What a comparison looks at: the residual stream after each layer and each router's choice."""

    hidden: tuple[Float[Array, "*D T H"], ...]
    topk_idx: tuple[Int32[Array, "*D T K"], ...]


class DecoderLayer(nnx.Module):
    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        *,
        num_slots: int,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        how: dict[str, Any] = dict(dtype=dtype, quantization=quantization)

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

        self.input_layernorm = norm()
        self.self_attn = MultiHeadLatentAttention(config, **how)
        self.post_attention_layernorm = norm()
        moe_idx = layer_idx - config.first_k_dense_replace
        if moe_idx < 0:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, **how)
        else:
            self.mlp = MoE(config, layer_idx=moe_idx, num_slots=num_slots, **how)


class DeepseekModel(nnx.Module):
    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(
                    config, idx, num_slots=num_slots, dtype=dtype, quantization=quantization
                )
                for idx in range(config.num_hidden_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        batch: Batch,
        cache: KVCache,
        placement: ExpertPlacement,
        plan: ExecutionPlan,
    ) -> tuple[Float[Array, "T H"], KVCache, Activations]:
        """The normalised last hidden state of each token, the cache with their latents."""
        is_token = batch.positions >= 0
        rotate = rotation(batch.positions, self.config)
        x = self.embed_tokens(batch.token_ids)
        latent, hidden, topk_idx = list(cache.latent), [], []
        for idx, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{idx}"):
                with jax.named_scope("attention"):
                    attended, latent[idx] = layer.self_attn(
                        layer.input_layernorm(x), latent[idx], batch, rotate
                    )
                x = x + attended
                normed = layer.post_attention_layernorm(x)
                if isinstance(layer.mlp, MoE):
                    y, routing = layer.mlp(normed, is_token, placement, plan)
                    topk_idx.append(routing.topk_idx)
                else:
                    y = layer.mlp(normed)
                x = x + y
            hidden.append(x)
        activations = Activations(hidden=tuple(hidden), topk_idx=tuple(topk_idx))
        return self.norm(x), KVCache(latent=tuple(latent)), activations


class DeepseekForCausalLM(nnx.Module):
    """`num_slots` is the number of physical experts over all ranks.

    With a `quantization`, the projections of attention (but `kv_b_proj`), MLPs and experts have it;
    embedding, head, norms and routers never do.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        self.model = DeepseekModel(
            config, num_slots=num_slots, dtype=dtype, quantization=quantization
        )
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=dtype)
        )

    def logits(self, hidden: Float[Array, "B H"]) -> Float32[Array, "B V"]:
        """Of normalised last hidden states, in float32."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return gemm(hidden, head.weight[...], dtype=jnp.float32)
