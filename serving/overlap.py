"""Two-batch overlap as the engine sees it: which steps are cut in two, where, and how often.

A step is cut when its compiled size is one that gains by it, as measured while warming up, or one
from which on it is asked for. The choice is the same on all members; answers do not depend on it.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxmoe.overlap.split import DEFAULT_THRESHOLD, place, split_requests, split_sequences
from serving.peers import Peers
from serving.scheduler import ScheduledBatch, ScheduledPrefill, StepPhase


logger = logging.getLogger(__name__)

REPEATS = 3  # timed steps of a size, each way
NEVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TwoBatchLimits:
    """From which size on steps are cut in two; None: where that was measured to be faster.

    Attributes:
      min_prefill_tokens, min_decode_requests: of a rank, padding included.
      threshold: see `split_sequences`.
    """

    min_prefill_tokens: int | None = None
    min_decode_requests: int | None = None
    threshold: float = DEFAULT_THRESHOLD

    def of(self, phase: StepPhase) -> int | None:
        is_prefill = phase is StepPhase.PREFILL
        return self.min_prefill_tokens if is_prefill else self.min_decode_requests


class TwoBatchOverlap:
    """The steps that are cut in two, of the phases that have a plan for it.

    Attributes:
      counts: steps that were cut, and the tokens of their halves, by phase.
    """

    def __init__(self, limits: TwoBatchLimits, phases: Sequence[StepPhase]):
        self._threshold = limits.threshold
        self._min_sizes = {
            phase: limits.of(phase) if phase in phases else NEVER for phase in StepPhase
        }
        self.counts = {
            f"{phase.value}_{what}": 0
            for phase in StepPhase
            for what in ("steps", "first_half_tokens", "second_half_tokens")
        }

    def is_split(self, phase: StepPhase, size: int) -> bool:
        min_size = self._min_sizes[phase]
        assert min_size is not None, "measure comes first"
        return size >= max(2, min_size)

    def ways(self, phase: StepPhase, size: int) -> list[bool]:
        """What `is_split` may come to be for steps of this size."""
        is_open = self._min_sizes[phase] is None and size >= 2
        return [False, True] if is_open else [size >= max(2, self._min_sizes[phase] or 2)]

    def measure(
        self,
        phase: StepPhase,
        sizes: Sequence[int],
        run: Callable[[int, bool], object],
        peers: Peers,
    ) -> None:
        """Find the sizes that gain, if not said; `run(size, is_split)` is a compiled step.

        From the smallest on from which all do, by the medians of the slowest member.
        """
        if self._min_sizes[phase] is not None:
            return
        self._min_sizes[phase] = NEVER
        for size in sorted(sizes, reverse=True):
            if size < 2:
                return
            whole, halves = _medians(size, run, peers)
            logger.info(
                "two-batch overlap, %s of %d: %.1f ms in halves, %.1f ms whole",
                phase.value, size, halves / 1e3, whole / 1e3,
            )  # fmt: skip
            if halves >= whole:
                return
            self._min_sizes[phase] = size

    def place(self, batch: ScheduledBatch, size: int) -> list[np.ndarray]:
        """The row of each token (prefill) or request (decode) of each rank, in their order: one
        after the other, or both halves of the rows with their share of a step that is cut."""
        if isinstance(batch, ScheduledPrefill):
            phase = StepPhase.PREFILL
            lengths = [[chunk.stop - chunk.start for chunk in chunks] for chunks in batch.chunks]
            lefts = [split_sequences(of_rank, self._threshold) for of_rank in lengths]
            counts = [sum(of_rank) for of_rank in lengths]
        else:
            phase = StepPhase.DECODE
            counts = [len(requests) for requests in batch.requests]
            lefts = [split_requests(count) for count in counts]
        if not self.is_split(phase, size):
            return [np.arange(count) for count in counts]
        places = [place(count, left, size) for count, left in zip(counts, lefts, strict=True)]
        first = sum(int((rows < size // 2).sum()) for rows in places)
        self.counts[f"{phase.value}_steps"] += 1
        self.counts[f"{phase.value}_first_half_tokens"] += first
        self.counts[f"{phase.value}_second_half_tokens"] += sum(counts) - first
        return places


def _medians(size: int, run: Callable[[int, bool], object], peers: Peers) -> tuple[int, int]:
    """Microseconds of a whole step and of one in halves, of the slowest member."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for is_split in (False, True):
            began = time.perf_counter()
            run(size, is_split)
            times[is_split].append(time.perf_counter() - began)
    own = tuple(round(1e6 * statistics.median(of_way)) for of_way in times)
    whole, halves = (max(of_way) for of_way in zip(*peers.agree(own), strict=True))
    return whole, halves
