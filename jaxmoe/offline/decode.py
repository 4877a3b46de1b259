"""Decoding a whole batch as one program: a loop on the devices until no rank has anything to do.

The host sees a batch twice, before its first and after its last step. Rows go in step, so that
column i of the output is every row's i-th token.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int32

from jaxmoe import sampling, sharding
from jaxmoe.batch import DecodeBatch
from jaxmoe.kv_cache import KVCache
from jaxmoe.plan import ExecutionPlan
from jaxmoe.sampling import SamplingBatch
from jaxmoe.step import ShardedModel, parameter_specs


NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeStart:
    """Where a batch's rows stand after prefill.

    Attributes:
      token_ids, positions: of each row's last token, which is not in the cache yet.
      remaining: tokens the row may still get, 0 for a row that is finished or empty.
      page_table: the row's pages, enough for all its tokens.
      sampling: how it is sampled; its positions are not looked at.
    """

    token_ids: Int32[Array | np.ndarray, "*D B"]
    positions: Int32[Array | np.ndarray, "*D B"]
    remaining: Int32[Array | np.ndarray, "*D B"]
    page_table: Int32[Array | np.ndarray, "*D B W"]
    sampling: SamplingBatch


def empty_start(num_ranks: int, batch_size: int, num_pages: int) -> DecodeStart:
    """A start without rows, of numpy arrays for the host to fill in."""
    rows = (num_ranks, batch_size)
    return DecodeStart(
        token_ids=np.zeros(rows, np.int32),
        positions=np.full(rows, -1, np.int32),
        remaining=np.zeros(rows, np.int32),
        page_table=np.zeros((*rows, num_pages), np.int32),
        sampling=sampling.greedy_batch(num_ranks, batch_size),
    )


class DecodeLoop:
    """The program, compiled once for each combination of shapes and `max_steps`."""

    def __init__(self, model: ShardedModel, plan: ExecutionPlan):
        self._model = model
        mesh, ranked, everywhere = model.mesh, sharding.PER_RANK, sharding.REPLICATED
        in_specs = (parameter_specs(model.params), ranked, ranked, everywhere, everywhere)

        def decode(max_steps, *arguments):
            return jax.shard_map(
                partial(_decode, model.graphdef, plan, max_steps),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=(ranked, ranked),
                check_vma=False,
            )(*arguments)

        self._decode = jax.jit(decode, static_argnums=0, donate_argnums=2)

    def __call__(
        self,
        cache: KVCache,
        start: DecodeStart,
        stop_ids: Int32[np.ndarray, " S"],
        *,
        max_steps: int,
    ) -> tuple[Int32[Array, "D B steps"], KVCache]:
        """Each row's tokens, then `NO_TOKEN`, and the cache, which is donated.

        A row ends with a token of `stop_ids` or after its `remaining` tokens, of which there must
        be at most `max_steps`.
        """
        model = self._model
        return self._decode(max_steps, model.params, cache, start, stop_ids, model.placement)


def _decode(graphdef, plan, max_steps, params, cache, start, stop_ids, placement):
    model = nnx.merge(graphdef, params)
    cache, start = (jax.tree.map(lambda x: x[0], tree) for tree in (cache, start))
    rows, page_size = start.token_ids.shape[0], cache.page_size
    row_idx = jnp.arange(rows, dtype=jnp.int32)

    def is_wanted(state):
        return (state["step"] < max_steps) & state["any_active"]

    def step(state):
        is_active, positions = state["remaining"] > 0, state["positions"]
        page = start.page_table[row_idx, positions // page_size]
        batch = DecodeBatch(
            token_ids=state["token_ids"],
            positions=jnp.where(is_active, positions, -1),
            slots=jnp.where(is_active, page * page_size + positions % page_size, 0),
            page_table=start.page_table,
        )
        hidden, new_cache, _ = model.model(batch, state["cache"], placement, plan)
        with jax.named_scope("sample"):
            how = dataclasses.replace(start.sampling, position=positions + 1)
            sampled = sampling.sample(model.logits(hidden), how, None).token_ids
        remaining = jnp.where(is_active & ~is_stop(sampled, stop_ids), state["remaining"] - 1, 0)
        new_column = jnp.where(is_active, sampled, NO_TOKEN)[:, None]
        return {
            "step": state["step"] + 1,
            "any_active": any_rank((remaining > 0).any()),
            "token_ids": jnp.where(is_active, sampled, state["token_ids"]),
            "positions": jnp.where(is_active, positions + 1, positions),
            "remaining": remaining,
            "tokens": jax.lax.dynamic_update_slice(
                state["tokens"], new_column, (jnp.int32(0), state["step"])
            ),
            "cache": new_cache,
        }

    state = jax.lax.while_loop(
        is_wanted,
        step,
        {
            "step": jnp.int32(0),
            "any_active": any_rank((start.remaining > 0).any()),
            "token_ids": start.token_ids,
            "positions": jnp.maximum(start.positions, 0),
            "remaining": start.remaining,
            "tokens": jnp.full((rows, max_steps), NO_TOKEN, jnp.int32),
            "cache": cache,
        },
    )
    return jax.tree.map(lambda x: x[None], (state["tokens"], state["cache"]))


def is_stop(token_ids: Int32[Array, " B"], stop_ids: Int32[Array, " S"]) -> Bool[Array, " B"]:
    return (token_ids[:, None] == stop_ids[None, :]).any(-1)


def any_rank(claim: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether the claim is true on any rank. All ranks must leave the loop together: a rank that
    stayed behind would wait for the others' tokens."""
    return jax.lax.psum(claim.astype(jnp.int32), sharding.EP_AXIS) > 0
