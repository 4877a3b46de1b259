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

from custom_calls.ep import Dispatcher
from custom_calls.gemm import gemm
from custom_calls.ordering import hold_until
from jaxmoe.batch import Batch, split
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.kv_cache import KVCache
from jaxmoe.model.linear import Embedding, Linear
from jaxmoe.model.mla import MultiHeadLatentAttention
from jaxmoe.model.mlp import MLP
from jaxmoe.model.norm import RMSNorm
from jaxmoe.model.rope import rotation
from jaxmoe.moe.dispatcher import make_dispatcher
from jaxmoe.moe.layer import MoE, MoEPass
from jaxmoe.overlap.emit import emit
from jaxmoe.overlap.schedule import Layers, Op, Overlap, Stage, make_schedule
from jaxmoe.plan import ExecutionPlan, Quantization


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activations:
    """What a comparison looks at: the residual stream after each layer and each router's choice, in
    logical experts and in the physical ones that got the tokens."""

    hidden: tuple[Float[Array, "*D T H"], ...]
    topk_idx: tuple[Int32[Array, "*D T K"], ...]
    physical_idx: tuple[Int32[Array, "*D T K"], ...]


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
        """The normalised last hidden state of each token, the cache with their latents.

        With overlap, in the order of the plan's schedule.
        """
        overlap = plan.overlap_of(batch.token_ids.shape[0])
        parts = split(batch, overlap.num_micro_batches)
        latent = list(cache.latent)
        passes = [
            _DecoderPass(self, part, latent, placement, plan, make_dispatcher(plan, channel=i))
            for i, part in enumerate(parts)
        ]
        layers = Layers(
            num_dense=self.config.first_k_dense_replace,
            num_moe=self.config.num_moe_layers,
            num_parts=tuple(len(plan.dispatch_parts(len(part.token_ids))) for part in parts),
        )

        def run(op: Op, after: Array | None) -> Array:
            with jax.named_scope(f"micro_batch_{op.micro_batch}"):
                return passes[op.micro_batch].run(op, after)

        emit(
            make_schedule(overlap, layers),
            run,
            is_pinned=overlap is not Overlap.NONE and plan.moe_a2a_backend != "reference",
        )
        x, activations = jax.tree.map(
            lambda *parts: jnp.concatenate(parts), *((p.x, p.activations) for p in passes)
        )
        return self.norm(x), KVCache(latent=tuple(latent)), activations


class _DecoderPass:
    """A micro-batch on its way through the layers, while a step is traced.

    Attributes:
      x: the residual stream.
    """

    def __init__(
        self,
        model: DeepseekModel,
        batch: Batch,
        latent: list[Array],
        placement: ExpertPlacement,
        plan: ExecutionPlan,
        dispatcher: Dispatcher,
    ):
        """`latent`, every layer's pool, is shared with the other micro-batches and changed."""
        self._layers = model.layers
        self._batch = batch
        self._latent = latent
        self._how = placement, plan, dispatcher
        self._is_token = batch.positions >= 0
        self._rotate = rotation(batch.positions, model.config)
        self.x = model.embed_tokens(batch.token_ids)
        self._hidden: list[Array] = []
        self._topk_idx: list[Array] = []
        self._physical_idx: list[Array] = []

    @property
    def activations(self) -> Activations:
        return Activations(tuple(self._hidden), tuple(self._topk_idx), tuple(self._physical_idx))

    def run(self, op: Op, after: Array | None) -> Array:
        """Trace a stage; an array that it computes. It begins after `after`, if that is given, or
        after what it reads from, which does."""
        layer = self._layers[op.layer]
        with jax.named_scope(f"layer_{op.layer}"), jax.named_scope(op.stage.value):
            match op.stage:
                case Stage.ATTENTION_PREPARE:
                    self.x = hold_until(self.x, after)
                    self._queries, self._latent[op.layer] = layer.self_attn.prepare(
                        layer.input_layernorm(self.x),
                        self._latent[op.layer],
                        self._batch,
                        self._rotate,
                    )
                    return self._queries[0]
                case Stage.ATTENTION_CORE:
                    queries = hold_until(self._queries[0], after), self._queries[1]
                    attended = layer.self_attn.core(queries, self._latent[op.layer], self._batch)
                    self.x = self.x + attended
                    self._normed = layer.post_attention_layernorm(self.x)
                    if isinstance(layer.mlp, MoE):
                        self._moe = MoEPass(layer.mlp, self._normed, self._is_token, *self._how)
                    return self._normed
                case Stage.MLP:
                    return self._finish(layer.mlp(self._normed))
                case Stage.GATE:
                    return self._moe.gate()
                case Stage.SHARED_EXPERTS:
                    return self._moe.shared_experts(after)
                case Stage.OUTPUT:
                    self._topk_idx.append(self._moe.routing.topk_idx)
                    self._physical_idx.append(self._moe.physical.topk_idx)
                    return self._finish(self._moe.output())
                case _:
                    return getattr(self._moe, op.stage.value)(op.part, after)

    def _finish(self, y: Array) -> Array:
        self.x = self.x + y
        self._hidden.append(self.x)
        return self.x


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
