"""What a worker does of a request: all of it, its prompt, or what comes after its first token.

Prefill and decode want different things: normal dispatch and contiguous tokens for prompts, low
latency and masked tokens for single ones. Workers of one role each run one kind of step, are
compiled and sized for it, and hand a request's cache from one to the other (`kv_transfer`).
"""

import enum

from jaxmoe.plan import ExecutionPlan
from serving.scheduler import StepPhase


class Role(enum.Enum):
    UNIFIED = "null"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def phases(self) -> tuple[StepPhase, ...]:
        """The kinds of steps that a worker of this role takes."""
        match self:
            case Role.PREFILL:
                return (StepPhase.PREFILL,)
            case Role.DECODE:
                return (StepPhase.DECODE,)
            case Role.UNIFIED:
                return tuple(StepPhase)

    def plans(self, prefill: ExecutionPlan, decode: ExecutionPlan) -> tuple[ExecutionPlan, ...]:
        """Of these plans, those of its steps."""
        plans = {StepPhase.PREFILL: prefill, StepPhase.DECODE: decode}
        return tuple(plans[phase] for phase in self.phases)
