"""How tokens reach their experts and come back: one dispatcher for each of DeepEP's modes.

Each mode has one token layout, so normal dispatch can only meet the contiguous grouped GEMM and
low-latency dispatch only the masked one. A handle is plain arrays: XLA sees it as data flow.
"""

import dataclasses
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Float

from custom_calls import ep
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from jaxmoe import sharding
from jaxmoe.moe.router import Routing
from jaxmoe.plan import DispatchMode, ExecutionPlan


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)


@dataclasses.dataclass(frozen=True)
class DispatchOutput(Generic[Tokens]):
    """Tokens in expert order, and what it takes to send the results back."""

    tokens: Tokens
    handle: Any


@runtime_checkable
class Dispatcher(Protocol):
    """`dispatch` then `combine`, each in two halves with the exchange in flight between them."""

    def dispatch_start(self, x: Float[Array, "T H"], routing: Routing) -> Any: ...

    def dispatch_finish(self, in_flight: Any) -> DispatchOutput: ...

    def combine_start(self, y: Any, handle: Any) -> Any: ...

    def combine_finish(self, in_flight: Any, handle: Any) -> Float[Array, "T H"]: ...


@dataclasses.dataclass(frozen=True)
class NormalDispatcher:
    """Exact counts, contiguous layout: for many tokens."""

    plan: ExecutionPlan

    def dispatch_start(self, x: Float[Array, "T H"], routing: Routing) -> ep.NormalInFlight:
        return ep.normal_dispatch_start(
            x,
            routing.topk_idx,
            routing.topk_weights,
            axis_name=sharding.EP_AXIS,
            slots_per_rank=self.plan.slots_per_rank,
            permute=self.plan.permute,
        )

    def dispatch_finish(self, in_flight: ep.NormalInFlight) -> DispatchOutput[ContiguousTokens]:
        tokens, handle = ep.normal_dispatch_finish(
            in_flight,
            slots_per_rank=self.plan.slots_per_rank,
            alignment=self.plan.row_alignment,
            permute=self.plan.permute,
        )
        return DispatchOutput(tokens, handle)

    def combine_start(self, y: ContiguousTokens, handle: ep.NormalHandle) -> Array:
        return ep.normal_combine_start(
            y, handle, axis_name=sharding.EP_AXIS, permute=self.plan.permute
        )

    def combine_finish(self, in_flight: Array, handle: ep.NormalHandle) -> Float[Array, "T H"]:
        return ep.normal_combine_finish(in_flight, handle, permute=self.plan.permute)


@dataclasses.dataclass(frozen=True)
class LowLatencyDispatcher:
    """A fixed slab [e, C, H], C at least D * T, masked layout: for few tokens."""

    plan: ExecutionPlan

    def dispatch_start(self, x: Float[Array, "T H"], routing: Routing) -> ep.LowLatencyInFlight:
        return ep.low_latency_dispatch_start(
            x,
            routing.topk_idx,
            routing.topk_weights,
            axis_name=sharding.EP_AXIS,
            slots_per_rank=self.plan.slots_per_rank,
            permute=self.plan.permute,
        )

    def dispatch_finish(self, in_flight: ep.LowLatencyInFlight) -> DispatchOutput[MaskedTokens]:
        tokens, handle = ep.low_latency_dispatch_finish(
            in_flight, alignment=self.plan.row_alignment, permute=self.plan.permute
        )
        return DispatchOutput(tokens, handle)

    def combine_start(self, y: MaskedTokens, handle: ep.LowLatencyHandle) -> Array:
        return ep.low_latency_combine_start(
            y, handle, axis_name=sharding.EP_AXIS, permute=self.plan.permute
        )

    def combine_finish(self, in_flight: Array, handle: ep.LowLatencyHandle) -> Float[Array, "T H"]:
        return ep.low_latency_combine_finish(in_flight, handle, permute=self.plan.permute)


def make_dispatcher(plan: ExecutionPlan) -> Dispatcher:
    if plan.dispatch_mode is DispatchMode.NORMAL:
        return NormalDispatcher(plan)
    return LowLatencyDispatcher(plan)
