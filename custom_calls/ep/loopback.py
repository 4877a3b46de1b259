"""Dispatch and combine between the ranks of an EP group on one host's CPUs. Local shapes.

The group is the one that `custom_calls.runtime.bootstrap` made; its ranks are devices of one
process or of several. Sizes go by the group's largest size, whichever ranks are active. Both modes
give `reference`'s results bit by bit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from custom_calls import cpu_library, runtime
from custom_calls.ep.api import DispatchOutput, Exchange
from custom_calls.ep.rows import pack, unpack
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.permute import permute_contiguous, unpermute


_TOKEN = jax.ShapeDtypeStruct((1,), jnp.int32)  # orders a finish after its start


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchInFlight:
    """Tokens under way; they are in the group's memory."""

    token: Int32[Array, " 1"]
    topk_idx: Int32[Array, "T K"]
    topk_weights: Float32[Array, "T K"]
    hidden: int = dataclasses.field(metadata={"static": True})
    row_size: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CombineInFlight:
    """Results under way; they are in the group's memory."""

    token: Int32[Array, " 1"]
    hidden: int = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalHandle:
    """What combining in normal mode needs. At most R = D * T rows arrived."""

    row_of: Int32[Array, "R K"]
    weights: Float32[Array, "R K"]
    source: Int32[Array, " R"]
    topk_idx: Int32[Array, "T K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """What combining in low-latency mode needs."""

    source: Int32[Array, "e C"]
    topk_idx: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


@dataclasses.dataclass(frozen=True)
class _Loopback(Exchange):
    def rank(self) -> Int32[Array, ""]:
        (own,) = cpu_library.call("jaxmoe_ep_rank", (jax.ShapeDtypeStruct((), jnp.int32),))
        return own

    def _dispatch_start(
        self,
        x: Array,
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        after: Array | None,
        *,
        by_expert: bool,
    ) -> DispatchInFlight:
        rows = pack(self.quantized(x))
        (token,) = self._call(
            "dispatch_start",
            (_TOKEN,),
            rows,
            topk_idx,
            topk_weights,
            topk_idx if after is None else after,
            channel=2 * self.channel,
            slots_per_rank=self.slots_per_rank,
            by_expert=by_expert,
        )
        return DispatchInFlight(
            token=token,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            hidden=x.shape[1],
            row_size=rows.shape[1],
            dtype=rows.dtype,
        )

    def _combine_start(
        self, rows: Array, source: Array, rows_per_rank: int, *, by_expert: bool
    ) -> CombineInFlight:
        (token,) = self._call(
            "combine_start",
            (_TOKEN,),
            rows,
            source,
            channel=2 * self.channel + 1,
            rows_per_rank=rows_per_rank,
            by_expert=by_expert,
        )
        return CombineInFlight(token=token, hidden=rows.shape[-1], dtype=rows.dtype)

    def _combine_finish(
        self,
        in_flight: CombineInFlight,
        topk_idx: Int32[Array, "T K"],
        weights: Float32[Array, "T K"],
        after: Array | None,
        *,
        by_expert: bool,
    ) -> Float[Array, "T H"]:
        (y,) = self._call(
            "combine_finish",
            (jax.ShapeDtypeStruct((topk_idx.shape[0], in_flight.hidden), in_flight.dtype),),
            in_flight.token,
            in_flight.token if after is None else after,
            topk_idx,
            weights,
            channel=2 * self.channel + 1,
            slots_per_rank=self.slots_per_rank,
            by_expert=by_expert,
        )
        return y

    def _call(
        self,
        name: str,
        results: tuple[jax.ShapeDtypeStruct, ...],
        *operands: Array,
        **attributes: Any,
    ) -> tuple[Array, ...]:
        runtime.current()  # raises when there is no group
        target = f"jaxmoe_loopback_{name}"
        return cpu_library.call(target, results, *operands, has_side_effect=True, **attributes)


@dataclasses.dataclass(frozen=True)
class Normal(_Loopback):
    """Normal mode: a `Dispatcher` into `ContiguousTokens`."""

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> DispatchInFlight:
        return self._dispatch_start(x, topk_idx, topk_weights, after, by_expert=False)

    def dispatch_finish(
        self, in_flight: DispatchInFlight, *, after: Array | None = None
    ) -> DispatchOutput[ContiguousTokens]:
        num_tokens, top_k = in_flight.topk_idx.shape
        rows, slots = runtime.current().spec.max_ep_size * num_tokens, self.slots_per_rank
        x, group_idx, weights, source = self._call(
            "normal_dispatch_finish",
            (
                jax.ShapeDtypeStruct((rows, in_flight.row_size), in_flight.dtype),
                jax.ShapeDtypeStruct((rows, top_k), jnp.int32),
                jax.ShapeDtypeStruct((rows, top_k), jnp.float32),
                jax.ShapeDtypeStruct((rows,), jnp.int32),
            ),
            in_flight.token,
            in_flight.token if after is None else after,
            channel=2 * self.channel,
            slots_per_rank=slots,
        )
        tokens, row_of = permute_contiguous(
            x,
            group_idx,
            num_groups=slots,
            max_rows=rows * min(top_k, slots) + (self.alignment - 1) * slots,
            alignment=self.alignment,
            implementation=self.permute,
        )
        handle = NormalHandle(
            row_of=row_of, weights=weights, source=source, topk_idx=in_flight.topk_idx
        )
        return DispatchOutput(unpack(tokens, in_flight.hidden), handle)

    def combine_start(self, y: ContiguousTokens, handle: NormalHandle) -> CombineInFlight:
        partial = unpermute(y.x, handle.row_of, handle.weights, implementation=self.permute)
        num_tokens, _ = handle.topk_idx.shape
        return self._combine_start(partial, handle.source, num_tokens, by_expert=False)

    def combine_finish(
        self, in_flight: CombineInFlight, handle: NormalHandle, *, after: Array | None = None
    ) -> Float[Array, "T H"]:
        ones = jnp.ones(handle.topk_idx.shape, jnp.float32)  # every rank has weighed its part
        return self._combine_finish(in_flight, handle.topk_idx, ones, after, by_expert=False)


@dataclasses.dataclass(frozen=True)
class LowLatency(_Loopback):
    """Low-latency mode: a `Dispatcher` into `MaskedTokens`.

    The capacity C is D * T rounded up to a multiple of the alignment.
    """

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> DispatchInFlight:
        return self._dispatch_start(x, topk_idx, topk_weights, after, by_expert=True)

    def dispatch_finish(
        self, in_flight: DispatchInFlight, *, after: Array | None = None
    ) -> DispatchOutput[MaskedTokens]:
        num_tokens, top_k = in_flight.topk_idx.shape
        slots, rows = self.slots_per_rank, runtime.current().spec.max_ep_size * num_tokens
        capacity = -(-rows // self.alignment) * self.alignment
        x, counts, source = self._call(
            "low_latency_dispatch_finish",
            (
                jax.ShapeDtypeStruct((slots, capacity, in_flight.row_size), in_flight.dtype),
                jax.ShapeDtypeStruct((slots,), jnp.int32),
                jax.ShapeDtypeStruct((slots, capacity), jnp.int32),
            ),
            in_flight.token,
            in_flight.token if after is None else after,
            channel=2 * self.channel,
            tokens_per_rank=num_tokens,
            top_k=top_k,
        )
        handle = LowLatencyHandle(
            source=source, topk_idx=in_flight.topk_idx, weights=in_flight.topk_weights
        )
        return DispatchOutput(unpack(MaskedTokens(x, counts), in_flight.hidden), handle)

    def combine_start(self, y: MaskedTokens, handle: LowLatencyHandle) -> CombineInFlight:
        return self._combine_start(y.x, handle.source, handle.topk_idx.size, by_expert=True)

    def combine_finish(
        self, in_flight: CombineInFlight, handle: LowLatencyHandle, *, after: Array | None = None
    ) -> Float[Array, "T H"]:
        return self._combine_finish(
            in_flight, handle.topk_idx, handle.weights, after, by_expert=True
        )
