"""Moving experts' weights to other slots while a model serves, without a compilation.

A rank fetches what its slots shall hold with the dispatcher that also moves tokens: what carries
tokens between ranks, in one process or in several, carries weights. It dispatches a token for each
row of weights that it wants to the slot that has it; the slot's rank answers with that row, and
combine brings it back to the token. This needs no more than the law of dispatchers.

An expert is a stack of rows as long as a token: those of its gate, up and down projections as they
are, FP8 ones as the numbers they stand for, scales as their bytes, a number each. All of these are
exact in the dtype of tokens; only a negative zero comes back as zero.

Rows are collected in a buffer of one layer, `rows_at_a_time` on each rank, and become the layer's
new arrays when they are all there. Old arrays are never written to. When to move is not here.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxmoe import sharding
from jaxmoe.moe.dispatcher import make_dispatcher
from jaxmoe.plan import DispatchMode, ExecutionPlan
from jaxmoe.step import ShardedModel, path_names


DIGIT = 128  # whole numbers up to here are exact in every dtype of tokens
NUM_DIGITS = 3


def relocation_plan(plan: ExecutionPlan) -> ExecutionPlan:
    """How weights are moved where tokens are moved as in this plan."""
    return ExecutionPlan(
        ep_size=plan.ep_size,
        slots_per_rank=plan.slots_per_rank,
        dispatch_mode=DispatchMode.NORMAL,
        moe_a2a_backend=plan.moe_a2a_backend,
        permute=plan.permute,
        row_alignment=plan.row_alignment,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Move:
    """What changes in a layer. Slots whose expert stays are not touched.

    Attributes:
      source: of each slot of all ranks [P], the slot to fetch its new expert from; -1 if it stays.
    """

    source: np.ndarray

    @property
    def num_slots(self) -> int:
        return int((self.source >= 0).sum())


def plan_move(old: np.ndarray, new: np.ndarray, slots_per_rank: int) -> Move:
    """From slots [P] that hold the experts `old` to ones that hold `new`.

    From a slot of the same rank where there is one, otherwise from the rank that has been asked for
    least so far.
    """
    source = np.full(len(old), -1, np.int64)
    asked = np.zeros(len(old) // slots_per_rank, np.int64)
    for slot in np.flatnonzero(old != new):
        holders = np.flatnonzero(old == new[slot])
        if not holders.size:
            raise ValueError(f"no slot holds expert {new[slot]}, slot {slot} cannot fetch it")
        ranks = holders // slots_per_rank
        own = ranks == slot // slots_per_rank
        best = holders[np.argmin(np.where(own, -1, asked[ranks]))]
        source[slot] = best
        asked[best // slots_per_rank] += not own.any()
    return Move(source)


class Relocator:
    """The compiled programs, and the buffer, that move one layer after the other.

    Every process of a group makes the same calls in the same order: `fetch` exchanges data.
    """

    def __init__(self, model: ShardedModel, plan: ExecutionPlan, *, rows_at_a_time: int):
        """`plan` is as `relocation_plan` gives it; an expert-parallel group must be there for it,
        where it needs one, with room for `rows_at_a_time` tokens."""
        self._mesh, self._dtype = model.mesh, jnp.dtype(model.dtype)
        self._ranks, self._slots_per_rank = model.ranks, model.slots_per_rank
        self._hidden = model.config.hidden_size
        self._rows_at_a_time = rows_at_a_time
        paths = jax.tree_util.tree_leaves_with_path(model.params)
        self._leaves = _expert_leaves([path_names(path) for path, _ in paths])
        self._shapes = [paths[leaf][1].shape[1:] for leaf in self._leaves[0]]
        self._dtypes = [jnp.dtype(paths[leaf][1].dtype) for leaf in self._leaves[0]]
        scales = [jnp.dtype(dtype) != self._dtype and dtype.itemsize > 1 for dtype in self._dtypes]
        self._forms = [
            _Form(shape, dtype, self._hidden, is_bytes=is_scale)
            for shape, dtype, is_scale in zip(self._shapes, self._dtypes, scales, strict=True)
        ]
        self.num_rows = sum(form.num_rows for form in self._forms)
        """Of an expert."""
        if self.num_rows > DIGIT**NUM_DIGITS:
            raise ValueError(f"an expert of {self.num_rows} rows of {self._hidden} is too large")
        ranked = sharding.PER_RANK

        def on_ranks(function, num_arguments, **options):
            return jax.jit(
                jax.shard_map(
                    function,
                    mesh=self._mesh,
                    in_specs=num_arguments * (ranked,),
                    out_specs=ranked,
                    check_vma=False,
                ),
                in_shardings=num_arguments * (sharding.per_rank(self._mesh),),
                **options,
            )

        dispatcher = make_dispatcher(plan)
        self._fetch = on_ranks(partial(_fetch, self._forms, dispatcher), 3, donate_argnums=1)
        self._finish = on_ranks(partial(_finish, self._forms), 3)
        self._empty = jax.jit(
            lambda: jnp.zeros(
                (self._mesh.size * self._slots_per_rank, self.num_rows, self._hidden), self._dtype
            ),
            out_shardings=sharding.per_rank(self._mesh),
        )
        self._buffer = self._empty()

    @property
    def slot_bytes(self) -> int:
        """Of the weights of one expert."""
        pairs = zip(self._shapes, self._dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)

    def reset(self) -> None:
        """A new buffer, after a `fetch` that failed."""
        self._buffer = self._empty()

    def num_fetches(self, move: Move) -> int:
        """How often `fetch` is to be called: as often as the rank with most to fetch needs."""
        most = (move.source.reshape(-1, self._slots_per_rank) >= 0).sum(1).max(initial=0)
        return -(-int(most) * self.num_rows // self._rows_at_a_time)

    def fetch(self, params: Any, layer: int, move: Move, index: int) -> None:
        """Fetch number `index` of this move, of MoE layer `layer`. Returns when it is done."""
        wanted = np.full((self._mesh.size, self._rows_at_a_time, 3), -1, np.int32)
        first = index * self._rows_at_a_time
        for rank in range(self._mesh.size):
            start = (self._ranks.first + rank) * self._slots_per_rank
            source = move.source[start : start + self._slots_per_rank]
            slots = np.flatnonzero(source >= 0)
            row = first + np.arange(self._rows_at_a_time)
            row = row[row < len(slots) * self.num_rows]
            target = slots[row // self.num_rows]
            fetched = np.stack([source[target], row % self.num_rows, target], axis=-1)
            wanted[rank, : len(row)] = fetched
        self._buffer = jax.block_until_ready(
            self._fetch(self.weights(params, layer), self._buffer, wanted)
        )

    def finish(self, params: Any, layer: int, move: Move) -> list[Array]:
        """The layer's new arrays, once everything is fetched."""
        start = self._ranks.first * self._slots_per_rank
        is_new = move.source[start : start + self._mesh.size * self._slots_per_rank] >= 0
        return jax.block_until_ready(
            self._finish(self.weights(params, layer), self._buffer, is_new)
        )

    def weights(self, params: Any, layer: int) -> list[Array]:
        """The arrays that hold an MoE layer's experts, in an order of their own."""
        leaves = jax.tree.leaves(params)
        return [leaves[leaf] for leaf in self._leaves[layer]]

    def replace(self, params: Any, weights: dict[int, list[Array]]) -> Any:
        """`params` with these arrays in MoE layers."""
        leaves, structure = jax.tree.flatten(params)
        for layer, arrays in weights.items():
            for leaf, array in zip(self._leaves[layer], arrays, strict=True):
                leaves[leaf] = array
        return jax.tree.unflatten(structure, leaves)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How one parameter of an expert is made of rows of `hidden` numbers."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    hidden: int
    is_bytes: bool

    @property
    def num_numbers(self) -> int:
        return math.prod(self.shape) * (self.dtype.itemsize if self.is_bytes else 1)

    @property
    def num_rows(self) -> int:
        return -(-self.num_numbers // self.hidden)

    def to_rows(self, weight: Array) -> Array:
        """All slots' [e * num_rows, hidden]; only bytes are copied."""
        num_slots = weight.shape[0]
        if self.is_bytes:
            weight = jax.lax.bitcast_convert_type(weight, jnp.uint8)
        weight = weight.reshape(num_slots, -1)
        missing = self.num_rows * self.hidden - self.num_numbers
        weight = jnp.pad(weight, ((0, 0), (0, missing))) if missing else weight
        return weight.reshape(num_slots * self.num_rows, self.hidden)

    def from_rows(self, rows: Float[Array, "e R H"]) -> Array:
        num_slots = rows.shape[0]
        numbers = rows.reshape(num_slots, -1)[:, : self.num_numbers]
        if not self.is_bytes:
            return numbers.astype(self.dtype).reshape(num_slots, *self.shape)
        numbers = numbers.astype(jnp.uint8).reshape(num_slots, *self.shape, self.dtype.itemsize)
        return jax.lax.bitcast_convert_type(numbers, self.dtype)


def _fetch(
    forms: Sequence[_Form],
    dispatcher: Any,
    weights: list[Array],
    buffer: Float[Array, "e R H"],
    wanted: Int32[Array, "1 T 3"],
) -> Float[Array, "e R H"]:
    """On a rank: the buffer with the rows that it wants, each a slot of the group, a row of its
    expert and the own slot it is for."""
    slot, row, target = jnp.moveaxis(wanted[0], -1, 0)
    num_slots, _, hidden = buffer.shape
    asked = jnp.where(slot < 0, 0, row)
    digits = [asked // DIGIT**i % DIGIT for i in range(NUM_DIGITS)]
    x = jnp.zeros((len(slot), hidden), buffer.dtype)
    x = x.at[:, :NUM_DIGITS].set(jnp.stack(digits, axis=-1).astype(buffer.dtype))
    ones = jnp.ones((len(slot), 1), jnp.float32)
    arrived = dispatcher.dispatch_finish(dispatcher.dispatch_start(x, slot[:, None], ones))

    tokens = arrived.tokens
    # Of rows that hold no token any answer will do, as long as it is one.
    came = jnp.nan_to_num(tokens.x[:, :NUM_DIGITS].astype(jnp.float32)).clip(0, DIGIT - 1)
    scale = jnp.asarray([DIGIT**i for i in range(NUM_DIGITS)], jnp.int32)
    asked = (came.astype(jnp.int32) * scale[None, :]).sum(1)
    place = jnp.arange(len(asked), dtype=jnp.int32)
    of_slot = jnp.searchsorted(tokens.group_starts, place, side="right").astype(jnp.int32) - 1
    answer = jnp.zeros((len(asked), hidden), buffer.dtype)
    first = 0
    for form, weight in zip(forms, weights, strict=True):
        own = asked - first
        is_here = (own >= 0) & (own < form.num_rows)
        rows = of_slot.clip(0, num_slots - 1) * form.num_rows + own.clip(0, form.num_rows - 1)
        found = form.to_rows(weight)[rows].astype(buffer.dtype)
        answer = jnp.where(is_here[:, None], found, answer)
        first += form.num_rows
    sent = dispatcher.combine_start(dataclasses.replace(tokens, x=answer), arrived.handle)
    fetched = dispatcher.combine_finish(sent, arrived.handle)
    # Past the end is nowhere.
    return buffer.at[jnp.where(slot < 0, num_slots, target), row].set(fetched, mode="drop")


def _finish(
    forms: Sequence[_Form], weights: list[Array], buffer: Float[Array, "e R H"], is_new: Array
) -> list[Array]:
    new, first = [], 0
    for form, weight in zip(forms, weights, strict=True):
        found = form.from_rows(buffer[:, first : first + form.num_rows])
        keep = is_new.reshape(-1, *(1 for _ in form.shape))
        new.append(jnp.where(keep, found, weight))
        first += form.num_rows
    return new


def _expert_leaves(names: Sequence[tuple[str | int, ...]]) -> list[list[int]]:
    """Which leaves of the parameters hold the experts of each MoE layer."""
    layers: dict[int, list[int]] = {}
    for leaf, path in enumerate(names):
        if "experts" in path:
            layers.setdefault(int(path[2]), []).append(leaf)
    return [layers[layer] for layer in sorted(layers)]
