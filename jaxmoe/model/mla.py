"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Local shapes.

Two forms of the same function, chosen by the type of the batch: prefill expands the cached latents
into keys and values, decode absorbs the expansion into the query and the output and attends to the
latents themselves. The function is in two stages, `prepare` and `core`.

Quantised, `kv_b_proj` is the exception: it is not multiplied with tokens but split into each head's
expansion, so FP8 checkpoints' is dequantised while loading, to the dtype of the activations.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from custom_calls import attention
from custom_calls.gemm import gemm_by_head
from jaxmoe import kv_cache
from jaxmoe.batch import Batch, PrefillBatch
from jaxmoe.config import ModelConfig
from jaxmoe.model.linear import Linear
from jaxmoe.model.norm import RMSNorm
from jaxmoe.model.rope import Rotation, apply_rope
from jaxmoe.plan import Quantization


LATENT_NORM_EPS = 1e-6  # DeepSeek's own modelling code ignores rms_norm_eps in these two norms.


Queries = tuple[Float[Array, "T N nope"], Float[Array, "T N rope"]]
"""Of each token and head: the part without position and the rotated one."""


class MultiHeadLatentAttention(nnx.Module):
    def __init__(
        self, config: ModelConfig, *, dtype: DTypeLike, quantization: Quantization | None = None
    ):
        self.config = config
        linear = partial(Linear, dtype=dtype, quantization=quantization)
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * config.qk_head_dim)
        else:
            rank = config.q_lora_rank
            self.q_a_proj = linear(hidden, rank, bias=bias)
            self.q_a_layernorm = RMSNorm(rank, eps=LATENT_NORM_EPS, dtype=dtype)
            self.q_b_proj = linear(rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, config.latent_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=LATENT_NORM_EPS, dtype=dtype)
        kv_dim = config.qk_nope_head_dim + config.v_head_dim
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * kv_dim, dtype=dtype)
        self.o_proj = linear(heads * config.v_head_dim, hidden, bias=bias)

    def prepare(
        self,
        x: Float[Array, "T H"],
        pages: Float[Array, "pages page_size latent"],
        batch: Batch,
        rotation: Rotation,
    ) -> tuple[Queries, Float[Array, "pages page_size latent"]]:
        """What the tokens ask for, and the layer's pool with their latents in it."""
        rows = self.kv_a_proj_with_mqa.prepare(x)
        queries = self._queries(rows, rotation)
        return queries, kv_cache.write(pages, self._latents(rows, rotation), batch.slots)

    def core(
        self,
        queries: Queries,
        pages: Float[Array, "pages page_size latent"],
        batch: Batch,
    ) -> Float[Array, "T H"]:
        """The attention output."""
        if isinstance(batch, PrefillBatch):
            values = self._attend_expanded(*queries, pages, batch)
        else:
            values = self._attend_absorbed(*queries, pages, batch)
        return self.o_proj(values.reshape(values.shape[0], -1))

    def _queries(self, rows, rotation) -> Queries:
        config = self.config
        with jax.named_scope("queries"):
            if config.q_lora_rank is None:
                q = self.q_proj(rows)
            else:
                q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(rows)))
            q = q.reshape(q.shape[0], config.num_attention_heads, config.qk_head_dim)
            q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
            return q_nope, apply_rope(q_rope, rotation)

    def _latents(self, rows, rotation) -> Float[Array, "T latent"]:
        with jax.named_scope("latents"):
            latent, k_rope = jnp.split(
                self.kv_a_proj_with_mqa(rows), [self.config.kv_lora_rank], axis=-1
            )
            return jnp.concatenate(
                (self.kv_a_layernorm(latent), apply_rope(k_rope, rotation)), axis=-1
            )

    def _expansion(self) -> Float[Array, "N nope_and_v rank"]:
        """kv_b_proj as the matrices that make each head's key and value from a latent."""
        config = self.config
        return self.kv_b_proj.weight[...].reshape(
            config.num_attention_heads, -1, config.kv_lora_rank
        )

    def _attend_expanded(self, q_nope, q_rope, pages, batch: PrefillBatch):
        w_key, w_value = jnp.split(self._expansion(), [self.config.qk_nope_head_dim], axis=1)
        with jax.named_scope("attend_expanded"):
            return attention.mla_prefill(
                q_nope,
                q_rope,
                pages,
                w_key,
                w_value,
                positions=batch.positions,
                request=batch.request,
                page_ids=batch.page_ids,
                page_request=batch.page_request,
                page_start=batch.page_start,
                num_pages=batch.num_pages,
                scale=self.config.softmax_scale,
            )

    def _attend_absorbed(self, q_nope, q_rope, pages, batch):
        weight, nope = self._expansion(), self.config.qk_nope_head_dim
        with jax.named_scope("attend_absorbed"):
            attended = attention.mla_decode(
                gemm_by_head(q_nope, weight, rows=(0, nope), transposed=True),
                q_rope,
                pages,
                page_table=batch.page_table,
                lengths=batch.positions + 1,
                scale=self.config.softmax_scale,
            )
            return gemm_by_head(attended, weight, rows=(nope, weight.shape[1]))
