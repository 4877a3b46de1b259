"""What a step reads besides weights and cache: one batch type per phase.

Arrays are global: the leading dimension D is the rank, and each rank has its own requests and page
pool. `of_rank` gives the local view inside `shard_map`. Attention picks its form (expanded or
absorbed) by the type of the batch.

Fields are typed Any: the host fills in numpy arrays, a step sees traced ones.

Padding: a padded token has position -1 and writes to slot 0, whose page 0 belongs to no request.
It is routed to no expert, so it costs no communication.
"""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Chunks of any number of requests, tokens end to end.

    A chunk's tokens attend to the pages of their own request, the chunk's own tokens included,
    which are written before they are read. Pages are listed request after request.

    Attributes:
      token_ids, positions, slots: of each token; a slot is page * page_size + offset.
      request: which request of the batch a token belongs to, -1 for padding.
      page_ids, page_request, page_start: the pages to read, whose they are (-1 for padding) and the
        position of their first token.
      num_pages: how many of the W pages are real.
    """

    token_ids: Int32[Any, "*D T"]
    positions: Int32[Any, "*D T"]
    slots: Int32[Any, "*D T"]
    request: Int32[Any, "*D T"]
    page_ids: Int32[Any, "*D W"]
    page_request: Int32[Any, "*D W"]
    page_start: Int32[Any, "*D W"]
    num_pages: Int32[Any, "*D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """One new token of each request.

    Attributes:
      token_ids, positions, slots: of the new tokens; a request's context is positions + 1 tokens.
      page_table: the pages of each request in order; entries past the context are ignored.
    """

    token_ids: Int32[Any, "*D B"]
    positions: Int32[Any, "*D B"]
    slots: Int32[Any, "*D B"]
    page_table: Int32[Any, "*D B W"]


Batch = PrefillBatch | DecodeBatch


def of_rank(batch: Batch) -> Batch:
    """The batch without its rank dimension, which is 1 inside `shard_map`."""
    return jax.tree.map(lambda x: x[0], batch)


def split(batch: Batch, num_parts: int) -> list[Batch]:
    """Local batches of consecutive tokens (prefill) or requests (decode), equally many if possible.

    All parts of a prefill batch list all its pages: a sequence may have tokens in several.
    """
    num_tokens = batch.token_ids.shape[0]
    bounds = [part * num_tokens // num_parts for part in range(num_parts + 1)]
    names = ["token_ids", "positions", "slots"]
    names.append("request" if isinstance(batch, PrefillBatch) else "page_table")
    return [
        dataclasses.replace(batch, **{name: getattr(batch, name)[start:stop] for name in names})
        for start, stop in itertools.pairwise(bounds)
    ]


def empty_prefill(num_ranks: int, num_tokens: int, num_pages: int) -> PrefillBatch:
    """An all-padding prefill batch of numpy arrays, for the host to fill in."""
    tokens, pages = (num_ranks, num_tokens), (num_ranks, num_pages)
    return PrefillBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=np.full(tokens, -1, np.int32),
        slots=np.zeros(tokens, np.int32),
        request=np.full(tokens, -1, np.int32),
        page_ids=np.zeros(pages, np.int32),
        page_request=np.full(pages, -1, np.int32),
        page_start=np.zeros(pages, np.int32),
        num_pages=np.zeros((num_ranks,), np.int32),
    )


def empty_decode(num_ranks: int, batch_size: int, num_pages: int) -> DecodeBatch:
    """An all-padding decode batch of numpy arrays, for the host to fill in."""
    rows = (num_ranks, batch_size)
    return DecodeBatch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.full(rows, -1, np.int32),
        slots=np.zeros(rows, np.int32),
        page_table=np.zeros((*rows, num_pages), np.int32),
    )


def fill(
    batch: Batch, *, page_size: int, num_pages: int, vocab_size: int, context: int | None = None
) -> Batch:
    """Give every row of an empty batch a token, for measurements; returns the batch.

    A prefill has one prompt on each rank, in the pages from 1 on, as long as a cache of `num_pages`
    pages allows. A decode has requests of `context` tokens each, a page's if not said; they share
    pages if there are fewer.
    """
    num_ranks, num_rows = batch.token_ids.shape
    row = np.arange(num_rows)
    batch.token_ids[:] = (7919 * row + 13 * np.arange(num_ranks)[:, None]) % vocab_size
    if isinstance(batch, DecodeBatch):
        last = (context or page_size) - 1
        pages = np.arange(last // page_size + 1)
        table = 1 + (row[:, None] * len(pages) + pages) % (num_pages - 1)
        batch.positions[:], batch.page_table[:, :, : len(pages)] = last, table
        batch.slots[:] = table[:, -1] * page_size + last % page_size
        return batch
    pages = min(-(-num_rows // page_size), batch.page_ids.shape[1], num_pages - 1)
    row = row[: pages * page_size]
    batch.positions[:, row], batch.slots[:, row], batch.request[:, row] = row, page_size + row, 0
    batch.page_ids[:, :pages], batch.page_request[:, :pages] = 1 + np.arange(pages), 0
    batch.page_start[:, :pages], batch.num_pages[:] = page_size * np.arange(pages), pages
    return batch
