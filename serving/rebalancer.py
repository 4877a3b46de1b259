"""Dynamic EPLB: when to rebalance experts, and each member's part in doing it while it serves.

    counting -> all counts gathered -> planned in the background -> moved piece by piece -> counting

Everything but the planning is done on the loop's thread between two steps, by all members in the
same order, a piece at a time: one fetch of rows, or the switch of a chunk of layers. A layer's
weights and its placement change together. All members know the same, so they plan the same.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxmoe.config import ModelConfig
from jaxmoe.eplb.algorithm import balancedness, improve, rank_load
from jaxmoe.eplb.placement import make_placement
from jaxmoe.eplb.relocate import Move, Relocator, plan_move
from serving.engine import Engine
from serving.lockstep import Rebalance
from serving.peers import MAX_PROPOSAL, Peers


logger = logging.getLogger(__name__)

MICROSECONDS = 1e6  # in a second: members agree on whole numbers


@dataclasses.dataclass(frozen=True)
class EplbOptions:
    """When and how to rebalance.

    Attributes:
      num_iterations: steps whose load is counted before each rebalance.
      layers_per_chunk: layers that are switched together; None for all.
      min_utilization: no rebalance while balancedness is at least this.
      deadline: seconds after which one that has not ended is abandoned.
    """

    num_iterations: int = 1000
    layers_per_chunk: int | None = None
    min_utilization: float = 1.0
    deadline: float = 60.0


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """What all members have seen of some steps.

    Attributes:
      of_expert: [L, E], choices of logical experts.
      of_rank: [L, G], the same by the rank that got the token.
      seconds, fetch_seconds, switch_seconds: of the steps, of one fetch of weights and of one
        layer's new arrays, the slowest member's.
    """

    of_expert: np.ndarray
    of_rank: np.ndarray
    seconds: float
    fetch_seconds: float
    switch_seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class RebalancePlan:
    """Where experts are to go, and what that is expected to bring over a window like the last.

    Attributes:
      slots: [L, P], the expert of each slot.
      before, after: balancedness of the window's load on the old slots and on these.
      moves: of each layer.
      saved, cost: seconds.
    """

    slots: np.ndarray
    before: float
    after: float
    moves: list[Move]
    saved: float
    cost: float

    @property
    def num_slots(self) -> int:
        return sum(move.num_slots for move in self.moves)


class Rebalancer:
    """One member's part. All members call `step`, `gather_if_due` and `advance` at the same times.

    Attributes:
      peers: the members; the loop's.
      counts: what it has done, for metrics.
      balancedness: of the load that ranks got in the last window; 1 before there is one.
      longest_pause: seconds that one piece of a rebalance has kept the steps waiting, at most.
    """

    def __init__(self, engine: Engine, relocator: Relocator, peers: Peers, options: EplbOptions):
        self._engine = engine
        self._relocator = relocator
        self.peers = peers
        self._options = options
        self._slots = np.asarray(engine.model.placement.physical_to_logical)
        self._fetch_seconds = self._switch_seconds = 0.0
        self._planner: _Planner | None = None
        self._pieces: Iterator[None] | None = None
        self._deadline = 0.0
        self.counts: dict[str, int | float] = dict.fromkeys(
            ("rebalances", "skipped", "abandoned", "moved_slots", "moved_bytes", "seconds"), 0
        )
        self.balancedness = 1.0
        self.longest_pause = 0.0
        self._begin_window()

    def warmup(self) -> None:
        """Compile what moves weights, and measure it: every slot fetches its own expert."""
        params, move = self._engine.model.params, Move(np.arange(self._slots.shape[1]))
        for _ in range(3):  # the first compiles
            self.peers.agree(())
            began = time.perf_counter()
            self._relocator.fetch(params, 0, move, 0)
            fetched = time.perf_counter()
            self._relocator.finish(params, 0, move)
            self._fetch_seconds = fetched - began
            self._switch_seconds = time.perf_counter() - fetched
        logger.info(
            "EPLB: fetching weights takes %.1f ms a piece, switching %.1f ms a layer",
            1e3 * self._fetch_seconds, 1e3 * self._switch_seconds,
        )  # fmt: skip
        self._begin_window()

    def step(self, seconds: float) -> None:
        """A step was taken."""
        self._num_steps += 1
        self._seconds += seconds

    @property
    def is_under_way(self) -> bool:
        return self._planner is not None or self._pieces is not None

    @property
    def wish(self) -> Rebalance:
        """What this member proposes."""
        if not self.is_under_way:
            return Rebalance.WAIT
        if self._planner is not None and self._planner.error is not None:
            return Rebalance.ABANDON
        if time.monotonic() > self._deadline:
            return Rebalance.ABANDON
        if self._planner is not None and self._planner.plan is None:
            return Rebalance.WAIT
        return Rebalance.GO_ON

    def gather_if_due(self) -> None:
        """After enough steps: gather what all members have counted, and begin to plan."""
        if self.is_under_way or self._num_steps < self._options.num_iterations:
            return
        began = time.perf_counter()
        window = self._gather()
        self.balancedness = balancedness(window.of_rank)
        logger.info(
            "EPLB: balancedness %.3f in the last %d steps", self.balancedness, self._num_steps
        )
        self._begin_window()
        if self.balancedness >= self._options.min_utilization:
            self.counts["skipped"] += 1
        else:
            self._deadline = time.monotonic() + self._options.deadline
            self._planner = _Planner(
                lambda: self._plan(window), self.peers.wake, self._options.deadline
            )
        self._paused_since(began)

    def advance(self) -> None:
        """Do the next piece; all members have said to go on."""
        began = time.perf_counter()
        if self._planner is not None:
            assert self._planner.plan is not None
            self._take(self._planner.plan)
            self._planner = None
        else:
            assert self._pieces is not None
            try:
                next(self._pieces)
            except StopIteration:
                self._pieces = None
                self.counts["rebalances"] += 1
                logger.info("EPLB: rebalanced")
                self._begin_window()
        self._paused_since(began)
        self.counts["seconds"] += time.perf_counter() - began

    def abandon(self, reason: str) -> None:
        """Give up what is under way, if anything is; chunks that have been switched stay so."""
        if not self.is_under_way:
            return
        if self._planner is not None and self._planner.error is not None:
            reason = self._planner.error
        self.counts["abandoned"] += 1
        logger.warning("EPLB: a rebalance was abandoned: %s", reason)
        self._planner = self._pieces = None
        self._relocator.reset()
        self._begin_window()

    def _begin_window(self) -> None:
        self._read = self._engine.load.read()
        self._num_steps, self._seconds = 0, 0.0

    def _gather(self) -> Window:
        own = self._engine.load.read() - self._read
        times = np.asarray([self._seconds, self._fetch_seconds, self._switch_seconds])
        values = np.concatenate(
            [own.of_expert.ravel(), own.of_rank.ravel(), (times * MICROSECONDS).astype(np.int64)]
        )
        parts = [
            self.peers.agree(values[start : start + MAX_PROPOSAL].tolist())
            for start in range(0, len(values), MAX_PROPOSAL)
        ]
        of_members = np.concatenate([np.asarray(part) for part in parts], axis=1)
        of_expert, of_rank = np.split(of_members[:, :-3].sum(0), [own.of_expert.size])
        return Window(
            of_expert.reshape(own.of_expert.shape),
            of_rank.reshape(own.of_rank.shape),
            *(float(x) for x in of_members[:, -3:].max(0) / MICROSECONDS),
        )

    def _plan(self, window: Window) -> RebalancePlan:
        """On the planner's thread."""
        model, load = self._engine.model, window.of_expert
        num_ranks = model.ranks.ep_size
        slots = improve(load, self._slots, num_ranks)
        before, after = (
            balancedness(rank_load(load, of, num_ranks)) for of in (self._slots, slots)
        )
        moves = [
            plan_move(old, new, model.slots_per_rank)
            for old, new in zip(self._slots, slots, strict=True)
        ]
        cost = sum(
            self._relocator.num_fetches(move) * window.fetch_seconds + window.switch_seconds
            for move in moves
            if move.num_slots
        )
        saved = window.seconds * routed_share(model.config) * (1 - before / after)
        return RebalancePlan(slots, before, after, moves, saved, cost)

    def _take(self, plan: RebalancePlan) -> None:
        is_worth_it = plan.saved > plan.cost
        logger.info(
            "EPLB: moving %d slots makes balancedness %.3f of %.3f, takes %.2f s and saves %.2f s "
            "a window: %s",
            plan.num_slots, plan.after, plan.before, plan.cost, plan.saved,
            "moving them" if is_worth_it else "left as it is",
        )  # fmt: skip
        if is_worth_it:
            self._pieces = self._move(plan)
        else:
            self.counts["skipped"] += 1

    def _move(self, plan: RebalancePlan) -> Iterator[None]:
        """Chunk by chunk; stops after each piece."""
        layers = [layer for layer, move in enumerate(plan.moves) if move.num_slots]
        size = self._options.layers_per_chunk or len(layers)
        for start in range(0, len(layers), size):
            chunk = layers[start : start + size]
            weights: dict[int, list[jax.Array]] = {}
            for layer in chunk:
                move, params = plan.moves[layer], self._engine.model.params
                for index in range(self._relocator.num_fetches(move)):
                    began = time.perf_counter()
                    self._relocator.fetch(params, layer, move, index)
                    took = time.perf_counter() - began
                    self._fetch_seconds += 0.1 * (took - self._fetch_seconds)
                    yield
                weights[layer] = self._relocator.finish(params, layer, move)
            self._switch(chunk, plan, weights)
            yield

    def _switch(
        self, layers: list[int], plan: RebalancePlan, weights: dict[int, list[jax.Array]]
    ) -> None:
        """From the next step on, these layers' experts lie as planned."""
        model = self._engine.model
        slots = self._slots.copy()
        slots[layers] = plan.slots[layers]
        self._engine.replace_experts(
            self._relocator.replace(model.params, weights),
            make_placement(slots, model.config.n_routed_experts),
        )
        self._slots = slots
        moved = sum(plan.moves[layer].num_slots for layer in layers)
        self.counts["moved_slots"] += moved
        self.counts["moved_bytes"] += moved * self._relocator.slot_bytes

    def _paused_since(self, began: float) -> None:
        self.longest_pause = max(self.longest_pause, time.perf_counter() - began)


class _Planner:
    """Makes a plan on a thread of its own, then wakes the loop; also when it is overdue."""

    def __init__(
        self, make: Callable[[], RebalancePlan], wake: Callable[[], None], deadline: float
    ):
        self.plan: RebalancePlan | None = None
        self.error: str | None = None
        self._make, self._wake = make, wake
        self._timer = threading.Timer(deadline + 0.01, wake)
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._run, name="eplb-planner", daemon=True).start()

    def _run(self) -> None:
        try:
            self.plan = self._make()
        except Exception as error:
            logger.exception("EPLB: planning failed")
            self.error = f"{type(error).__name__}: {error}"
        self._timer.cancel()
        self._wake()


def routed_share(config: ModelConfig) -> float:
    """The part of a token's multiplications that routed experts do, attention to other tokens left
    out: what a better balance makes shorter."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = config.q_lora_rank
    attention = hidden * heads * key if query is None else query * (hidden + heads * key)
    attention += hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    attention += config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    attention += heads * config.v_head_dim * hidden
    expert = 3 * hidden * config.moe_intermediate_size
    routed = config.num_moe_layers * config.num_experts_per_tok * expert
    shared = config.num_moe_layers * config.n_shared_experts * expert
    dense = config.first_k_dense_replace * 3 * hidden * config.intermediate_size
    rest = config.num_hidden_layers * attention + hidden * config.vocab_size
    return routed / (routed + shared + dense + rest)
