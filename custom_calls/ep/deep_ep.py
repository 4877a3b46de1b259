"""Dispatch and combine between the GPUs of one host, with DeepEP's kernels. Local shapes.

The group is the one that `custom_calls.runtime.bootstrap` made, its ranks are GPUs of one process
or of several. Tokens are bfloat16. A GPU runs a program's kernels in its order, so that a finish
has no `after` to wait for. Within an expert, normal mode has `reference`'s order of rows;
low-latency mode has the rows in the order in which they came.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32, Shaped

from custom_calls import runtime
from custom_calls.deep_ep import library
from custom_calls.ep.api import DispatchOutput, Exchange
from custom_calls.ep.rows import pack, unpack
from custom_calls.layouts import ContiguousTokens, MaskedTokens, num_scale_blocks
from custom_calls.permute import permute_contiguous, unpermute


FP8_ALIGNMENT = 128


def _int64(x: Int32[Array, "T K"]) -> Int32[Array, "T K 2"]:
    """Little-endian 64-bit integers, for which JAX has no type by default."""
    return jnp.stack([x, x >> 31], -1)


@dataclasses.dataclass(frozen=True)
class _DeepEp(Exchange):
    def rank(self) -> Int32[Array, ""]:
        return runtime.current().first_rank + jax.lax.axis_index(self.axis_name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalRoute:
    """Where D * T rows at most came from, through C channels."""

    source: Int32[Array, " DT"]
    rank_prefix: Int32[Array, "D D"]
    channel_prefix: Int32[Array, "D C"]
    send_head: Int32[Array, "T D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalInFlight:
    """What has arrived in normal mode."""

    rows: Shaped[Array, "DT R"]
    group_idx: Int32[Array, "DT K"]
    weights: Float32[Array, "DT K"]
    route: NormalRoute
    hidden: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalHandle:
    """What combining in normal mode needs."""

    row_of: Int32[Array, "DT K"]
    weights: Float32[Array, "DT K"]
    route: NormalRoute


@dataclasses.dataclass(frozen=True)
class Normal(_DeepEp):
    """Normal mode: a `Dispatcher` into `ContiguousTokens`.

    One kernel sends and receives, so that all is done when a start is.
    """

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> NormalInFlight:
        spec = runtime.current().spec
        num_tokens, top_k = topk_idx.shape
        ranks, channels = spec.max_ep_size, spec.normal_sms // 2
        num_rows, experts = ranks * num_tokens, ranks * self.slots_per_rank
        rows = pack(self.quantized(x))
        row_bytes = rows.shape[1] * rows.dtype.itemsize
        if row_bytes % 32:
            raise ValueError(f"'deepep' moves rows of a multiple of 32 bytes, got {row_bytes}")

        def int32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        arrived, source, idx, weights, rank_prefix, channel_prefix, send_head, *_ = library.call(
            "normal_dispatch",
            (
                jax.ShapeDtypeStruct((num_rows, rows.shape[1]), rows.dtype),
                int32(num_rows),
                int32(num_rows, top_k, 2),
                jax.ShapeDtypeStruct((num_rows, top_k), jnp.float32),
                int32(ranks, ranks),
                int32(ranks, channels),
                int32(num_tokens, ranks),
                int32(ranks, channels),
                int32(ranks),
                int32(experts),
                jax.ShapeDtypeStruct((num_tokens, ranks), jnp.bool_),
                int32(self.slots_per_rank + 1),
            ),
            rows,
            _int64(topk_idx),
            topk_weights,
            topk_idx if after is None else after,
            micro_batch=self.channel,
        )
        return NormalInFlight(
            rows=arrived,
            group_idx=idx[..., 0],
            weights=weights,
            route=NormalRoute(source, rank_prefix, channel_prefix, send_head),
            hidden=x.shape[1],
        )

    def dispatch_finish(
        self, in_flight: NormalInFlight, *, after: Array | None = None
    ) -> DispatchOutput[ContiguousTokens]:
        num_rows, top_k = in_flight.group_idx.shape
        slots = self.slots_per_rank
        tokens, row_of = permute_contiguous(
            in_flight.rows,
            in_flight.group_idx,
            num_groups=slots,
            max_rows=num_rows * min(top_k, slots) + (self.alignment - 1) * slots,
            alignment=self.alignment,
            implementation=self.permute,
        )
        handle = NormalHandle(row_of=row_of, weights=in_flight.weights, route=in_flight.route)
        return DispatchOutput(unpack(tokens, in_flight.hidden), handle)

    def combine_start(self, y: ContiguousTokens, handle: NormalHandle) -> Float[Array, "T H"]:
        partial = unpermute(y.x, handle.row_of, handle.weights, implementation=self.permute)
        route = handle.route
        num_tokens, _ = route.send_head.shape
        _, combined = library.call(
            "normal_combine",
            (
                jax.ShapeDtypeStruct(route.send_head.shape, jnp.int32),
                jax.ShapeDtypeStruct((num_tokens, partial.shape[1]), partial.dtype),
            ),
            partial,
            route.source,
            route.rank_prefix,
            route.channel_prefix,
            route.send_head,
            aliases={4: 0},
            micro_batch=self.channel,
        )
        return combined

    def combine_finish(
        self, in_flight: Float[Array, "T H"], handle: NormalHandle, *, after: Array | None = None
    ) -> Float[Array, "T H"]:
        return in_flight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """What combining in low-latency mode needs: C = D * M rows an expert, at most M from a rank."""

    source: Int32[Array, "e C"]
    layout_range: Int32[Array, "e D 2"]
    topk_idx: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyInFlight:
    """What arrives in low-latency mode."""

    x: Shaped[Array, "e C H"]
    scale: Float32[Array, "..."]  # [e, H / 128, C] in FP8
    counts: Int32[Array, " e"]
    handle: LowLatencyHandle


@dataclasses.dataclass(frozen=True)
class LowLatency(_DeepEp):
    """Low-latency mode: a `Dispatcher` into `MaskedTokens`.

    The capacity C is D * M, M being T rounded up so that C is a multiple of the alignment, and of
    128 in FP8: the kernel writes the scales of experts that far apart. It quantises while it sends:
    its FP8 values differ from `quantize`'s in the last bit.
    `split`: a start only sends, so that a finish may come much later.
    """

    split: bool = False

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> LowLatencyInFlight:
        num_tokens, hidden = x.shape
        ranks, slots = runtime.current().spec.max_ep_size, self.slots_per_rank
        tokens_per_rank = self._tokens_per_rank(num_tokens)
        capacity = ranks * tokens_per_rank
        scale_shape = (slots, num_scale_blocks(hidden), capacity) if self.fp8 else (1,)
        received, scale, source, layout_range, counts = library.call(
            "low_latency_dispatch_start",
            (
                jax.ShapeDtypeStruct(
                    (slots, capacity, hidden), jnp.float8_e4m3fn if self.fp8 else x.dtype
                ),
                jax.ShapeDtypeStruct(scale_shape, jnp.float32),
                jax.ShapeDtypeStruct((slots, capacity), jnp.int32),
                jax.ShapeDtypeStruct((slots, ranks, 2), jnp.int32),
                jax.ShapeDtypeStruct((slots,), jnp.int32),
            ),
            x,
            _int64(topk_idx),
            topk_idx if after is None else after,
            micro_batch=self.channel,
            tokens_per_rank=tokens_per_rank,
            split=self.split,
        )
        return LowLatencyInFlight(
            x=received,
            scale=scale,
            counts=counts,
            handle=LowLatencyHandle(source, layout_range, topk_idx, topk_weights),
        )

    def dispatch_finish(
        self, in_flight: LowLatencyInFlight, *, after: Array | None = None
    ) -> DispatchOutput[MaskedTokens]:
        handle = in_flight.handle
        num_tokens, top_k = handle.topk_idx.shape
        arrays = (
            in_flight.x,
            in_flight.scale,
            handle.source,
            handle.layout_range,
            in_flight.counts,
        )
        if self.split:
            arrays = library.call(
                "low_latency_dispatch_finish",
                tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays),
                *arrays,
                aliases={i: i for i in range(len(arrays))},
                micro_batch=self.channel,
                tokens_per_rank=self._tokens_per_rank(num_tokens),
                top_k=top_k,
            )
        x, scale, source, layout_range, counts = arrays
        tokens = MaskedTokens(x, counts, scale if self.fp8 else None)
        handle = dataclasses.replace(handle, source=source, layout_range=layout_range)
        return DispatchOutput(tokens, handle)

    def combine_start(self, y: MaskedTokens, handle: LowLatencyHandle) -> Float[Array, "T H"]:
        num_tokens, _ = handle.topk_idx.shape
        (combined,) = library.call(
            "low_latency_combine_start",
            (jax.ShapeDtypeStruct((num_tokens, y.x.shape[2]), y.x.dtype),),
            y.x,
            _int64(handle.topk_idx),
            handle.weights,
            handle.source,
            handle.layout_range,
            micro_batch=self.channel,
            tokens_per_rank=self._tokens_per_rank(num_tokens),
            split=self.split,
        )
        return combined

    def combine_finish(
        self,
        in_flight: Float[Array, "T H"],
        handle: LowLatencyHandle,
        *,
        after: Array | None = None,
    ) -> Float[Array, "T H"]:
        if not self.split:
            return in_flight
        num_tokens, _ = handle.topk_idx.shape
        (combined,) = library.call(
            "low_latency_combine_finish",
            (jax.ShapeDtypeStruct(in_flight.shape, in_flight.dtype),),
            in_flight,
            _int64(handle.topk_idx),
            handle.weights,
            aliases={0: 0},
            micro_batch=self.channel,
            tokens_per_rank=self._tokens_per_rank(num_tokens),
        )
        return combined

    def _tokens_per_rank(self, num_tokens: int) -> int:
        alignment = math.lcm(self.alignment, FP8_ALIGNMENT) if self.fp8 else self.alignment
        step = alignment // math.gcd(alignment, runtime.current().spec.max_ep_size)
        return -(-num_tokens // step) * step


def warm_up(mesh: Mesh) -> None:
    """Run every kernel that the group may need once on all its ranks, sending nothing.

    Kernels are loaded when they first run, which must not be while a command buffer is recorded.
    """
    spec = runtime.current().spec
    (axis,) = mesh.axis_names
    how: dict[str, Any] = dict(
        axis_name=axis, slots_per_rank=spec.slots_per_rank, permute="reference"
    )
    dispatchers: list[Any] = []
    if spec.normal_tokens:
        dispatchers.append(Normal(**how))
    if spec.low_latency_tokens:
        dispatchers += [
            LowLatency(**how, fp8=fp8, split=split)
            for fp8 in (False, True)
            for split in (False, True)
        ]

    def run(x: Array, idx: Array, weights: Array) -> Array:
        for dispatcher in dispatchers:
            arrived = dispatcher.dispatch_finish(dispatcher.dispatch_start(x, idx, weights))
            y = dataclasses.replace(arrived.tokens, x=arrived.tokens.x.astype(x.dtype), scale=None)
            x = dispatcher.combine_finish(
                dispatcher.combine_start(y, arrived.handle), arrived.handle
            )
        return x

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(axis), out_specs=P(axis), check_vma=False)
    compiled = jax.jit(mapped, compiler_options={"xla_gpu_enable_command_buffer": ""})
    shape = (mesh.size, spec.top_k)
    jax.block_until_ready(
        compiled(
            jnp.zeros((mesh.size, spec.hidden_size), jnp.bfloat16),
            jnp.full(shape, -1, jnp.int32),
            jnp.zeros(shape, jnp.float32),
        )
    )
