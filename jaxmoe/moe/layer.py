"""The mixture-of-experts layer. Local shapes inside `shard_map`.

Its steps are methods of their own, named as overlap schedules name them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from custom_calls.ep import Dispatcher
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.model.mlp import MLP
from jaxmoe.moe.dispatcher import make_dispatcher
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

    def __call__(
        self,
        x: Float[Array, "T H"],
        is_token: Bool[Array, " T"],
        placement: ExpertPlacement,
        plan: ExecutionPlan,
    ) -> tuple[Float[Array, "T H"], Routing]:
        """The layer's output and the logical experts it used."""
        with jax.named_scope("gate"):
            routing = self.gate(x, is_token)
        dispatcher = make_dispatcher(plan)
        physical = self.place(routing, placement, dispatcher, plan)
        bound = plan.max_dispatch_tokens_per_rank or x.shape[0]
        parts: list[Array] = []
        for start in range(0, x.shape[0], bound):
            part = slice(start, start + bound)
            routing_of_part = jax.tree.map(lambda a, part=part: a[part], physical)
            after = parts[-1] if parts else None
            parts.append(self.run_experts(x[part], routing_of_part, dispatcher, plan, after=after))
        with jax.named_scope("shared_experts"):
            shared = self.shared_experts(x)
        return jnp.concatenate(parts) + shared, routing

    def place(
        self,
        routing: Routing,
        placement: ExpertPlacement,
        dispatcher: Dispatcher,
        plan: ExecutionPlan,
    ) -> Routing:
        """The same routing in physical experts."""
        with jax.named_scope("place"):
            topk_idx = placement.to_physical(
                routing.topk_idx,
                layer=self.layer_idx,
                rank=dispatcher.rank(),
                slots_per_rank=plan.slots_per_rank,
            )
        return Routing(topk_idx=topk_idx, topk_weights=routing.topk_weights)

    def run_experts(
        self,
        x: Float[Array, "T H"],
        routing: Routing,
        dispatcher: Dispatcher,
        plan: ExecutionPlan,
        *,
        after: Array | None = None,
    ) -> Float[Array, "T H"]:
        """The routed experts' weighted sum for one dispatch of tokens, made after `after`."""
        with jax.named_scope("dispatch"):
            in_flight = dispatcher.dispatch_start(
                x, routing.topk_idx, routing.topk_weights, after=after
            )
            arrived = dispatcher.dispatch_finish(in_flight)
        with jax.named_scope("experts"):
            y = self.experts(
                arrived.tokens,
                dtype=x.dtype,
                expected_rows=plan.expected_rows(*routing.topk_idx.shape),
                gemm_implementation=plan.grouped_gemm,
                quantize_implementation=plan.quantize,
            )
        with jax.named_scope("combine"):
            in_flight = dispatcher.combine_start(y, arrived.handle)
            return dispatcher.combine_finish(in_flight, arrived.handle)
