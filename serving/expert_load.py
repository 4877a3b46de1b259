"""What the engine's steps have counted so far of the tokens each expert and each rank got.

The device counts slots; here they become logical experts and ranks, which mean the same before and
after experts move, in 64 bits. Counts are of this member's own tokens, over all ranks of the group.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jaxmoe.eplb.load import empty_load
from jaxmoe.step import ShardedModel


MAX_STEPS = 4096  # between reads: 32 bits hold so many of half a million tokens each


@dataclasses.dataclass(frozen=True, eq=False)
class LoadTotals:
    """Since the start.

    Attributes:
      of_expert: [L, E], choices of logical experts.
      of_rank: [L, G], the same by the rank that got the token.
      num_tokens: that the host has seen; each makes top-k choices in every layer.
    """

    of_expert: np.ndarray
    of_rank: np.ndarray
    num_tokens: int = 0

    def __add__(self, other: "LoadTotals") -> "LoadTotals":
        return LoadTotals(
            self.of_expert + other.of_expert,
            self.of_rank + other.of_rank,
            self.num_tokens + other.num_tokens,
        )

    def __sub__(self, before: "LoadTotals") -> "LoadTotals":
        return LoadTotals(
            self.of_expert - before.of_expert,
            self.of_rank - before.of_rank,
            self.num_tokens - before.num_tokens,
        )


class ExpertLoad:
    """Of the model that `model()` returns, whose placement may change after a `read`.

    Attributes:
      counters: what a step takes and gives back; see `jaxmoe.eplb.load`.
    """

    def __init__(self, model: Callable[[], ShardedModel]):
        self._model = model
        config, ranks = model().config, model().ranks
        layers = config.num_moe_layers
        self._totals = LoadTotals(
            np.zeros((layers, config.n_routed_experts), np.int64),
            np.zeros((layers, ranks.ep_size), np.int64),
        )
        self._num_steps = self._num_tokens = 0
        self.counters = self._empty()

    def took(self, counters: jax.Array, num_tokens: int) -> None:
        """A step of this many tokens has given back its counters."""
        self.counters = counters
        self._num_steps += 1
        self._num_tokens += num_tokens
        if self._num_steps == MAX_STEPS:
            self.read()

    def reset(self) -> None:
        """After a step that failed: what was not read is lost."""
        self.counters = self._empty()
        self._num_steps = self._num_tokens = 0

    def read(self) -> LoadTotals:
        """What all steps have counted; waits for the last one."""
        if self._num_steps:
            of_slot = np.asarray(self.counters).sum(0, dtype=np.int64)  # [L, P]
            slots = np.asarray(self._model().placement.physical_to_logical)
            of_expert = self._totals.of_expert.copy()
            np.add.at(of_expert, (np.arange(len(slots))[:, None], slots), of_slot)
            by_rank = of_slot.reshape(*self._totals.of_rank.shape, -1).sum(-1)
            self._totals = LoadTotals(
                of_expert,
                self._totals.of_rank + by_rank,
                self._totals.num_tokens + self._num_tokens,
            )
            self.reset()
        return self._totals

    def _empty(self) -> jax.Array:
        model = self._model()
        return empty_load(model.mesh, model.config.num_moe_layers, model.num_slots)
