"""What the members of a group do next, all of them the same.

Each member proposes what it could do; `decide` makes one decision of all proposals and of what the
decisions before have led to, which is the same on every member. Pure; no member asks another.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from serving.scheduler import StepPhase


class Proposal(NamedTuple):
    """What one member brings to a decision, as integers.

    Attributes:
      prefill_tokens, decode_rows: of its fullest rank, if the step were of that phase.
      num_active: requests in its hands, waiting ones included.
      stop: it has been asked to shut down and needs no more steps.
      flush: it has been asked to empty the cache.
      failed: its last step failed.
      rebalance: what it wants of the rebalance under way, a `Rebalance`.
      record: what it has been asked for of the recorder, a `Record`.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    num_active: int = 0
    stop: int = 0
    flush: int = 0
    failed: int = 0
    rebalance: int = 0
    record: int = 0


class Rebalance(enum.IntEnum):
    """What happens next to a rebalance of experts; all members go on together, any one ends it."""

    WAIT = 0
    GO_ON = 1
    ABANDON = 2


class Record(enum.IntEnum):
    """What the recorders of the expert distribution are asked for; any member's asking will do."""

    NOTHING = 0
    START = 1
    STOP = 2
    DUMP = 3


@dataclasses.dataclass(frozen=True)
class Decision:
    """What all members do now.

    Attributes:
      phase: the step to take, None when nobody has work.
      size: prefill tokens or decode rows of the fullest rank of all members.
      num_active: requests in the hands of all members.
      stop: every member wants to; this is the end.
      flush: some member asks for an empty cache; possible when `num_active` is 0.
      recover: some member's last step failed. Nothing else is done before that is mended.
      rebalance: see `Rebalance`.
      record: what all recorders do.
    """

    phase: StepPhase | None
    size: int
    num_active: int
    stop: bool
    flush: bool
    recover: bool
    rebalance: Rebalance
    record: Record


def decide(proposals: Sequence[Proposal], last_phase: StepPhase | None) -> Decision:
    """`last_phase` is that of the last step taken, None before the first.

    Prompts have priority, but a decode step follows each prefill step as long as anyone decodes.
    """
    tokens = max(proposal.prefill_tokens for proposal in proposals)
    rows = max(proposal.decode_rows for proposal in proposals)
    phase, size = None, 0
    if rows and (last_phase is StepPhase.PREFILL or not tokens):
        phase, size = StepPhase.DECODE, rows
    elif tokens:
        phase, size = StepPhase.PREFILL, tokens
    return Decision(
        phase,
        size,
        num_active=sum(proposal.num_active for proposal in proposals),
        stop=all(proposal.stop for proposal in proposals),
        flush=any(proposal.flush for proposal in proposals),
        recover=any(proposal.failed for proposal in proposals),
        rebalance=_rebalance([proposal.rebalance for proposal in proposals]),
        record=Record(max(proposal.record for proposal in proposals)),
    )


def _rebalance(wishes: Sequence[int]) -> Rebalance:
    if Rebalance.ABANDON in wishes:
        return Rebalance.ABANDON
    return Rebalance.GO_ON if set(wishes) == {Rebalance.GO_ON} else Rebalance.WAIT
