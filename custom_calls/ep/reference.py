"""Dispatch and combine over one mesh axis, with XLA's dense all-to-all. Local shapes.

Both modes are the same three moves: `permute` the tokens into one block for each destination,
exchange the blocks, `permute` what arrived into expert order; combine undoes them backwards. Each
function is split where the exchange is in flight, so that other work can be put in between:
`_start` packs and sends, `_finish` unpacks.

Block sizes are the largest possible ones, so nothing can overflow and nothing is ever dropped. Rows
that carry no token hold unspecified values, travel with their block and are never read.

Law: with identity experts and weights that sum to one, combine(dispatch(x)) == x.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.permute import permute_contiguous, permute_masked, unpermute


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalInFlight:
    """Tokens under way in normal mode: a block of T rows from each of D ranks."""

    x: Float[Array, "D T H"]
    group_idx: Int32[Array, "D T K"]
    weights: Float32[Array, "D T K"]
    sent_to: Int32[Array, "T D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NormalHandle:
    """What `normal_combine_*` needs to send results back."""

    row_of: Int32[Array, "DT K"]
    weights: Float32[Array, "DT K"]
    sent_to: Int32[Array, "T D"]


def normal_dispatch_start(
    x: Float[Array, "T H"],
    topk_idx: Int32[Array, "T K"],
    topk_weights: Float32[Array, "T K"],
    *,
    axis_name: str,
    slots_per_rank: int,
    permute: str | None = None,
) -> NormalInFlight:
    """Send each token once to every rank that holds one of its experts.

    `topk_idx` are physical experts, -1 for none; an expert lives on rank idx // slots_per_rank.
    """
    num_tokens, top_k = topk_idx.shape
    num_ranks = jax.lax.axis_size(axis_name)
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    group = topk_idx[:, None, :] - (ranks * slots_per_rank)[None, :, None]  # [T, D, K]
    group = jnp.where((group >= 0) & (group < slots_per_rank), group, -1)
    goes_to = jnp.where((group >= 0).any(-1), ranks[None, :], -1)
    blocks, sent_to = permute_masked(
        x, goes_to, num_groups=num_ranks, capacity=num_tokens, implementation=permute
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
        x=_exchange(blocks.x, axis_name),
        group_idx=_exchange(group_idx.reshape(by_rank), axis_name),
        weights=_exchange(weights.reshape(by_rank), axis_name),
        sent_to=sent_to,
    )


def normal_dispatch_finish(
    in_flight: NormalInFlight,
    *,
    slots_per_rank: int,
    alignment: int = 1,
    permute: str | None = None,
) -> tuple[ContiguousTokens, NormalHandle]:
    """The arrived tokens sorted by local expert, exact counts.

    Each expert's rows start at a multiple of `alignment`.
    """
    num_ranks, num_tokens, hidden = in_flight.x.shape
    rows = num_ranks * num_tokens
    group_idx = in_flight.group_idx.reshape(rows, -1)
    max_rows = rows * min(group_idx.shape[1], slots_per_rank) + (alignment - 1) * slots_per_rank
    tokens, row_of = permute_contiguous(
        in_flight.x.reshape(rows, hidden),
        group_idx,
        num_groups=slots_per_rank,
        max_rows=max_rows,
        alignment=alignment,
        implementation=permute,
    )
    handle = NormalHandle(
        row_of=row_of, weights=in_flight.weights.reshape(rows, -1), sent_to=in_flight.sent_to
    )
    return tokens, handle


def normal_combine_start(
    y: ContiguousTokens, handle: NormalHandle, *, axis_name: str, permute: str | None = None
) -> Float[Array, "D T H"]:
    """Add up each token's local experts by weight and send the sum back to its rank."""
    _, num_ranks = handle.sent_to.shape
    partial = unpermute(y.x, handle.row_of, handle.weights, implementation=permute)
    return _exchange(partial.reshape(num_ranks, -1, partial.shape[-1]), axis_name)


def normal_combine_finish(
    in_flight: Float[Array, "D T H"], handle: NormalHandle, *, permute: str | None = None
) -> Float[Array, "T H"]:
    """Add up what the ranks sent for each token; a token that went nowhere gets zeros."""
    rows = in_flight.reshape(-1, in_flight.shape[-1])
    return unpermute(rows, handle.sent_to, None, implementation=permute)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyInFlight:
    """Tokens under way in low-latency mode: a block of T rows from each rank for each expert."""

    x: Float[Array, "D e T H"]
    counts: Int32[Array, "D e"]
    sent_to: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowLatencyHandle:
    """What `low_latency_combine_*` needs to send results back."""

    row_of: Int32[Array, "DeT 1"]
    sent_to: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


def low_latency_dispatch_start(
    x: Float[Array, "T H"],
    topk_idx: Int32[Array, "T K"],
    topk_weights: Float32[Array, "T K"],
    *,
    axis_name: str,
    slots_per_rank: int,
    permute: str | None = None,
) -> LowLatencyInFlight:
    """Send each token once for each of its experts, into that expert's block for this rank."""
    num_tokens, _ = topk_idx.shape
    num_ranks = jax.lax.axis_size(axis_name)
    blocks, sent_to = permute_masked(
        x,
        topk_idx,
        num_groups=num_ranks * slots_per_rank,
        capacity=num_tokens,
        implementation=permute,
    )
    by_rank = (num_ranks, slots_per_rank)
    return LowLatencyInFlight(
        x=_exchange(blocks.x.reshape(*by_rank, num_tokens, -1), axis_name),
        counts=_exchange(blocks.counts.reshape(by_rank), axis_name),
        sent_to=sent_to,
        weights=topk_weights,
    )


def low_latency_dispatch_finish(
    in_flight: LowLatencyInFlight, *, alignment: int = 1, permute: str | None = None
) -> tuple[MaskedTokens, LowLatencyHandle]:
    """The slab [e, C, H] of arrived tokens, each expert's rows packed to the front.

    The capacity C is D * T rounded up to a multiple of `alignment`.
    """
    num_ranks, slots_per_rank, num_tokens, hidden = in_flight.x.shape
    is_token = jnp.arange(num_tokens, dtype=jnp.int32)[None, None, :] < in_flight.counts[:, :, None]
    slot = jnp.arange(slots_per_rank, dtype=jnp.int32)[None, :, None]
    tokens, row_of = permute_masked(
        in_flight.x.reshape(-1, hidden),
        jnp.where(is_token, slot, -1).reshape(-1, 1),
        num_groups=slots_per_rank,
        capacity=-(-num_ranks * num_tokens // alignment) * alignment,
        implementation=permute,
    )
    handle = LowLatencyHandle(row_of=row_of, sent_to=in_flight.sent_to, weights=in_flight.weights)
    return tokens, handle


def low_latency_combine_start(
    y: MaskedTokens, handle: LowLatencyHandle, *, axis_name: str, permute: str | None = None
) -> Float[Array, "D e T H"]:
    """Send each row of the slab back to the rank and block it came from."""
    slots_per_rank, capacity, hidden = y.x.shape
    num_tokens = handle.sent_to.shape[0]
    rows = unpermute(
        y.x.reshape(slots_per_rank * capacity, hidden), handle.row_of, None, implementation=permute
    )
    return _exchange(rows.reshape(-1, slots_per_rank, num_tokens, hidden), axis_name)


def low_latency_combine_finish(
    in_flight: Float[Array, "D e T H"], handle: LowLatencyHandle, *, permute: str | None = None
) -> Float[Array, "T H"]:
    """Add up each token's experts by weight, on the token's own rank."""
    rows = in_flight.reshape(-1, in_flight.shape[-1])
    return unpermute(rows, handle.sent_to, handle.weights, implementation=permute)


def _exchange(blocks: Array, axis_name: str) -> Array:
    """Block d goes to rank d; what returns in block d came from rank d."""
    return jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
