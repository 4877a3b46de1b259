"""The dispatcher of a plan: its mode and its backend. What they do is `custom_calls.ep`'s."""

from custom_calls import ep
from jaxmoe import sharding
from jaxmoe.plan import DispatchMode, ExecutionPlan


def make_dispatcher(plan: ExecutionPlan, *, channel: int = 0) -> ep.Dispatcher:
    """Dispatchers whose calls may overlap have different channels (micro-batches)."""
    backends = ep.NORMAL if plan.dispatch_mode is DispatchMode.NORMAL else ep.LOW_LATENCY
    return backends[plan.moe_a2a_backend](
        axis_name=sharding.EP_AXIS,
        slots_per_rank=plan.slots_per_rank,
        alignment=plan.row_alignment,
        fp8=plan.fp8_dispatch,
        permute=plan.permute,
        quantize=plan.quantize,
        channel=channel,
    )
