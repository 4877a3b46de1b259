"""The expert distribution recorder: what `jaxmoe.eplb.recording` holds, recorded while serving.

All members start, stop and dump at the same time, between two steps, and each writes a file with
its own tokens.
"""

import collections
import dataclasses
import logging
import time
from pathlib import Path

import numpy as np

from jaxmoe.eplb.recording import Recording, RecordingMode
from serving.engine import Engine
from serving.expert_load import LoadTotals
from serving.lockstep import Record
from serving.peers import Peers


logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RecorderOptions:
    """What to record and where to.

    Attributes:
      buffer_size: passes that are kept, the last ones; None for all. In mode `stat`, where passes
        are only added up, it does not matter.
      directory: of this member's files; made when it is first needed.
      member, num_members: who this is.
    """

    mode: RecordingMode = RecordingMode.STAT
    buffer_size: int | None = 1000
    directory: Path = Path()
    member: int = 0
    num_members: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class _Pass:
    load: LoadTotals
    topk_idx: np.ndarray | None


class Recorder:
    """One member's part. All members call `act` and `step` at the same times."""

    def __init__(self, engine: Engine, peers: Peers, options: RecorderOptions):
        self._engine = engine
        self._peers = peers
        self._options = options
        self._is_recording = False
        self._last: LoadTotals | None = None
        self._empty()

    def act(self, what: Record) -> list[str]:
        """Do what all members have decided on; after a dump the names of all members' files.

        Raises RuntimeError when it cannot be done now, with nothing changed.
        """
        if what is Record.DUMP:
            return self._dump()
        if what is Record.START and self._is_recording:
            raise RuntimeError("a recording is under way: stop it first")
        if what is Record.STOP and not self._is_recording:
            raise RuntimeError("no recording is under way")
        self._is_recording = what is Record.START
        if self._is_recording:
            self._empty()
            self._last = self._engine.load.read()
        else:
            self._add_up()
        return []

    def step(self, *, failed: bool) -> None:
        """A step was taken, on all members; on this one it may have failed."""
        if not self._is_recording:
            return
        self._num_steps += 1
        if self._options.mode is RecordingMode.STAT:
            return
        if failed:  # what it counted is lost
            load, topk_idx = self._nothing(), self._choices([])
        else:
            assert self._last is not None
            before, self._last = self._last, self._engine.load.read()
            load = self._last - before
            topk_idx = self._choices([np.asarray(of_layer) for of_layer in self._engine.topk_idx])
        self._passes.append(_Pass(load, topk_idx))

    def _empty(self) -> None:
        self._num_steps = 0
        self._sum: LoadTotals | None = None
        self._passes: collections.deque[_Pass] = collections.deque(maxlen=self._options.buffer_size)

    def _add_up(self) -> None:
        """Of mode `stat`: add what was counted since the last time."""
        if self._options.mode is RecordingMode.STAT:
            assert self._last is not None
            before, self._last = self._last, self._engine.load.read()
            new = self._last - before
            self._sum = new if self._sum is None else self._sum + new

    def _nothing(self) -> LoadTotals:
        assert self._last is not None
        return self._last - self._last  # a step that failed may have taken the counters with it

    def _choices(self, of_layers: list[np.ndarray]) -> np.ndarray | None:
        """The experts that a step's tokens chose [tokens, L, K], of [D, T, K] of each layer."""
        if self._options.mode is not RecordingMode.PER_TOKEN:
            return None
        config = self._engine.model.config
        if not of_layers:
            return np.zeros((0, config.num_moe_layers, config.num_experts_per_tok), np.int32)
        chosen = np.stack(of_layers, axis=2)  # [D, T, L, K]
        return chosen[chosen[:, :, 0, 0] >= 0].astype(np.int32)

    def _dump(self) -> list[str]:
        if not self._num_steps:
            raise RuntimeError("no step has been recorded: start a recording and send requests")
        if self._is_recording:
            self._add_up()
        millis = max(values[0] for values in self._peers.agree((time.time_ns() // 1_000_000,)))
        options = self._options
        paths = [
            f"expert_distribution_{millis}_member{member}.npz"
            for member in range(options.num_members)
        ]
        error: OSError | None = None
        try:
            options.directory.mkdir(parents=True, exist_ok=True)
            self._recording().save(options.directory / paths[options.member])
        except OSError as caught:
            error = caught
            logger.exception("the recording was not written")
        failed = [m for m, (is_bad,) in enumerate(self._peers.agree((int(error is not None),)))
                  if is_bad]  # fmt: skip
        if failed:
            raise OSError(f"members {failed} could not write their files: {error or 'see its log'}")
        self._empty()
        return [str(options.directory / path) for path in paths]

    def _recording(self) -> Recording:
        model, options = self._engine.model, self._options
        passes = list(self._passes)
        if options.mode is RecordingMode.STAT:
            assert self._sum is not None
            passes = [_Pass(self._sum, None)]
        topk_idx = None
        if options.mode is RecordingMode.PER_TOKEN:
            topk_idx = np.concatenate([one.topk_idx for one in passes if one.topk_idx is not None])
        return Recording(
            mode=options.mode,
            counts=np.stack([one.load.of_expert for one in passes]),
            of_rank=np.stack([one.load.of_rank for one in passes]),
            num_tokens=np.asarray([one.load.num_tokens for one in passes], np.int64),
            slots=np.asarray(model.placement.physical_to_logical),
            top_k=model.config.num_experts_per_tok,
            topk_idx=topk_idx,
            member=options.member,
            num_members=options.num_members,
        )
