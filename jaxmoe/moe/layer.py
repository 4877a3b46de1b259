"""The mixture-of-experts layer, in the stages of overlap schedules. Local shapes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from custom_calls.ep import Dispatcher
from custom_calls.ordering import hold_until
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.model.mlp import MLP
from jaxmoe.moe.experts import Experts
from jaxmoe.moe.router import Router, Routing
from jaxmoe.plan import ExecutionPlan, Quantization


class MoE(nnx.Module):
    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_idx: int,
        num_slots: int,
        dtype: DTypeLike,
        quantization: Quantization | None = None,
    ):
        self.layer_idx = layer_idx
        """Among the MoE layers: the row of `ExpertPlacement` that is this layer's."""
        width = config.moe_intermediate_size
        how: dict[str, Any] = dict(dtype=dtype, quantization=quantization)
        self.gate = Router(config)
        self.experts = Experts(config, num_slots, **how)
        self.shared_experts = MLP(config.hidden_size, config.n_shared_experts * width, **how)


class MoEPass:
    """Tokens on their way through a layer, while a step is traced.

    One method for each stage of `jaxmoe.overlap.schedule`, which says in what order they may be
    called; each returns an array that it computes, and begins when `after` has been computed, or
    reads from what does. More tokens than one dispatch takes are sent in parts, one by one.
    """

    def __init__(
        self,
        layer: MoE,
        x: Float[Array, "T H"],
        is_token: Bool[Array, " T"],
        placement: ExpertPlacement,
        plan: ExecutionPlan,
        dispatcher: Dispatcher,
    ):
        self._layer = layer
        self._x = x
        self._is_token = is_token
        self._placement = placement
        self._plan = plan
        self._dispatcher = dispatcher
        self._parts = plan.dispatch_parts(x.shape[0])
        self._combined: list[Array] = []

    def gate(self) -> Array:
        """Choose logical experts, then the physical ones that have them."""
        self.routing = self._layer.gate(self._x, self._is_token)
        with jax.named_scope("place"):
            topk_idx = self._placement.to_physical(
                self.routing.topk_idx,
                layer=self._layer.layer_idx,
                rank=self._dispatcher.rank(),
                slots_per_rank=self._plan.slots_per_rank,
            )
        self.physical = Routing(topk_idx=topk_idx, topk_weights=self.routing.topk_weights)
        return topk_idx

    def dispatch_start(self, part: int, after: Array | None) -> Array:
        here = self._parts[part]
        self._in_flight = self._dispatcher.dispatch_start(
            self._x[here],
            self.physical.topk_idx[here],
            self.physical.topk_weights[here],
            after=self._combined[-1] if self._combined else after,
        )
        return jax.tree.leaves(self._in_flight)[0]

    def dispatch_finish(self, part: int, after: Array | None) -> Array:
        self._arrived = self._dispatcher.dispatch_finish(self._in_flight, after=after)
        return self._arrived.tokens.x

    def experts(self, part: int, after: Array | None) -> Array:
        here = self._parts[part]
        top_k = self.physical.topk_idx.shape[1]
        self._y = self._layer.experts(
            self._arrived.tokens,
            dtype=self._x.dtype,
            expected_rows=self._plan.expected_rows(here.stop - here.start, top_k),
            gemm_implementation=self._plan.grouped_gemm,
            quantize_implementation=self._plan.quantize,
        )
        return self._y.x

    def combine_start(self, part: int, after: Array | None) -> Array:
        self._in_flight = self._dispatcher.combine_start(self._y, self._arrived.handle)
        return jax.tree.leaves(self._in_flight)[0]

    def combine_finish(self, part: int, after: Array | None) -> Array:
        combined = self._dispatcher.combine_finish(
            self._in_flight, self._arrived.handle, after=after
        )
        self._combined.append(combined)
        return combined

    def shared_experts(self, after: Array | None) -> Array:
        self._shared = self._layer.shared_experts(hold_until(self._x, after))
        return self._shared

    def output(self) -> Float[Array, "T H"]:
        return jnp.concatenate(self._combined) + self._shared
