"""Dispatch and combine over one mesh axis, with XLA's dense all-to-all. Local shapes.

Both modes are the same three moves: `permute` the tokens into one block for each destination,
exchange the blocks, `permute` what arrived into expert order; combine undoes them backwards.

Block sizes are the largest possible ones, so nothing can overflow and nothing is ever dropped. Rows
that carry no token hold unspecified values, travel with their block and are never read.

XLA orders its collectives itself: `after` says nothing here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from custom_calls.ep.api import DispatchOutput, Exchange
from custom_calls.ep.rows import pack, unpack
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.permute import permute_contiguous, permute_masked, unpermute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalInFlight:
    """Tokens under way in normal mode: a block of T rows from each of D ranks."""

    x: Shaped[Array, "D T R"]
    group_idx: Int32[Array, "D T K"]
    weights: Float32[Array, "D T K"]
    sent_to: Int32[Array, "T D"]
    hidden: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalHandle:
    """What combining in normal mode needs."""

    row_of: Int32[Array, "DT K"]
    weights: Float32[Array, "DT K"]
    sent_to: Int32[Array, "T D"]


@dataclasses.dataclass(frozen=True)
class Normal(Exchange):
    """Normal mode: a `Dispatcher` into `ContiguousTokens`."""

    def rank(self) -> Int32[Array, ""]:
        return jax.lax.axis_index(self.axis_name)

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> NormalInFlight:
        num_tokens, top_k = topk_idx.shape
        num_ranks = jax.lax.axis_size(self.axis_name)
        ranks = jnp.arange(num_ranks, dtype=jnp.int32)
        group = topk_idx[:, None, :] - (ranks * self.slots_per_rank)[None, :, None]  # [T, D, K]
        group = jnp.where((group >= 0) & (group < self.slots_per_rank), group, -1)
        goes_to = jnp.where((group >= 0).any(-1), ranks[None, :], -1)
        blocks, sent_to = permute_masked(
            pack(self.quantized(x)),
            goes_to,
            num_groups=num_ranks,
            capacity=num_tokens,
            implementation=self.permute,
        )
        # A row's experts and weights travel beside it; a row without a token has no experts.
        rows = jnp.where(sent_to < 0, num_ranks * num_tokens, sent_to)
        group_idx = jnp.full((num_ranks * num_tokens, top_k), -1, jnp.int32)
        group_idx = group_idx.at[rows].set(group, mode="drop")
        weights = jnp.zeros((num_ranks * num_tokens, top_k), jnp.float32)
        weights = weights.at[rows].set(
            jnp.broadcast_to(topk_weights[:, None, :], (num_tokens, num_ranks, top_k)), mode="drop"
        )
        by_rank = (num_ranks, num_tokens, top_k)
        return NormalInFlight(
            x=self._exchange(blocks.x),
            group_idx=self._exchange(group_idx.reshape(by_rank)),
            weights=self._exchange(weights.reshape(by_rank)),
            sent_to=sent_to,
            hidden=x.shape[1],
        )

    def dispatch_finish(
        self, in_flight: NormalInFlight, *, after: Array | None = None
    ) -> DispatchOutput[ContiguousTokens]:
        num_ranks, num_tokens, row_size = in_flight.x.shape
        rows, slots = num_ranks * num_tokens, self.slots_per_rank
        group_idx = in_flight.group_idx.reshape(rows, -1)
        tokens, row_of = permute_contiguous(
            in_flight.x.reshape(rows, row_size),
            group_idx,
            num_groups=slots,
            max_rows=rows * min(group_idx.shape[1], slots) + (self.alignment - 1) * slots,
            alignment=self.alignment,
            implementation=self.permute,
        )
        handle = NormalHandle(
            row_of=row_of, weights=in_flight.weights.reshape(rows, -1), sent_to=in_flight.sent_to
        )
        return DispatchOutput(unpack(tokens, in_flight.hidden), handle)

    def combine_start(self, y: ContiguousTokens, handle: NormalHandle) -> Float[Array, "D T H"]:
        _, num_ranks = handle.sent_to.shape
        partial = unpermute(y.x, handle.row_of, handle.weights, implementation=self.permute)
        return self._exchange(partial.reshape(num_ranks, -1, partial.shape[-1]))

    def combine_finish(
        self, in_flight: Float[Array, "D T H"], handle: NormalHandle, *, after: Array | None = None
    ) -> Float[Array, "T H"]:
        rows = in_flight.reshape(-1, in_flight.shape[-1])
        return unpermute(rows, handle.sent_to, None, implementation=self.permute)

    def _exchange(self, blocks: Array) -> Array:
        return _exchange(blocks, self.axis_name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyInFlight:
    """Tokens under way in low-latency mode: a block of T rows from each rank for each expert."""

    x: Shaped[Array, "D e T R"]
    counts: Int32[Array, "D e"]
    sent_to: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]
    hidden: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """What combining in low-latency mode needs."""

    row_of: Int32[Array, "DeT 1"]
    sent_to: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


@dataclasses.dataclass(frozen=True)
class LowLatency(Exchange):
    """Low-latency mode: a `Dispatcher` into `MaskedTokens`.

    The capacity C is D * T rounded up to a multiple of the alignment.
    """

    def rank(self) -> Int32[Array, ""]:
        return jax.lax.axis_index(self.axis_name)

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> LowLatencyInFlight:
        num_tokens, _ = topk_idx.shape
        num_ranks = jax.lax.axis_size(self.axis_name)
        blocks, sent_to = permute_masked(
            pack(self.quantized(x)),
            topk_idx,
            num_groups=num_ranks * self.slots_per_rank,
            capacity=num_tokens,
            implementation=self.permute,
        )
        by_rank = (num_ranks, self.slots_per_rank)
        return LowLatencyInFlight(
            x=self._exchange(blocks.x.reshape(*by_rank, num_tokens, -1)),
            counts=self._exchange(blocks.counts.reshape(by_rank)),
            sent_to=sent_to,
            weights=topk_weights,
            hidden=x.shape[1],
        )

    def dispatch_finish(
        self, in_flight: LowLatencyInFlight, *, after: Array | None = None
    ) -> DispatchOutput[MaskedTokens]:
        num_ranks, slots, num_tokens, row_size = in_flight.x.shape
        row = jnp.arange(num_tokens, dtype=jnp.int32)[None, None, :]
        is_token = row < in_flight.counts[:, :, None]
        slot = jnp.arange(slots, dtype=jnp.int32)[None, :, None]
        tokens, row_of = permute_masked(
            in_flight.x.reshape(-1, row_size),
            jnp.where(is_token, slot, -1).reshape(-1, 1),
            num_groups=slots,
            capacity=-(-num_ranks * num_tokens // self.alignment) * self.alignment,
            implementation=self.permute,
        )
        handle = LowLatencyHandle(
            row_of=row_of, sent_to=in_flight.sent_to, weights=in_flight.weights
        )
        return DispatchOutput(unpack(tokens, in_flight.hidden), handle)

    def combine_start(self, y: MaskedTokens, handle: LowLatencyHandle) -> Float[Array, "D e T H"]:
        slots, capacity, hidden = y.x.shape
        num_tokens = handle.sent_to.shape[0]
        rows = unpermute(
            y.x.reshape(slots * capacity, hidden), handle.row_of, None, implementation=self.permute
        )
        return self._exchange(rows.reshape(-1, slots, num_tokens, hidden))

    def combine_finish(
        self,
        in_flight: Float[Array, "D e T H"],
        handle: LowLatencyHandle,
        *,
        after: Array | None = None,
    ) -> Float[Array, "T H"]:
        rows = in_flight.reshape(-1, in_flight.shape[-1])
        return unpermute(rows, handle.sent_to, handle.weights, implementation=self.permute)

    def _exchange(self, blocks: Array) -> Array:
        return _exchange(blocks, self.axis_name)


def _exchange(blocks: Array, axis_name: str) -> Array:
    """Block d goes to rank d; what returns in block d came from rank d."""
    return jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
