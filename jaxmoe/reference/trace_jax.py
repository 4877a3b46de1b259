"""Our model over prompts, recorded in the form of the reference's traces.

Prompts go round-robin to the ranks, all are prefilled together, whole or in chunks, and decoded
together, fed with the tokens they are given: after a first difference both models still see the
same input.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmoe import kv_cache
from jaxmoe.batch import Batch, DecodeBatch, PrefillBatch, empty_decode, empty_prefill
from jaxmoe.kv_cache import KVCache
from jaxmoe.reference.trace import Trace
from jaxmoe.step import ShardedModel, Steps


PAGE_SIZE = 16
ROW_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class _Request:
    """A prompt on its rank, with pages for all of its tokens."""

    index: int
    fed: np.ndarray
    num_prompt_tokens: int
    rank: int
    row: int
    pages: np.ndarray

    def slots(self, positions: np.ndarray) -> np.ndarray:
        return self.pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Which rows of a batch are which positions of a request."""

    request: _Request
    start: int
    positions: np.ndarray


def trace_model(
    model: ShardedModel,
    steps: Steps,
    fed: Sequence[np.ndarray],
    num_prompt_tokens: Sequence[int],
    *,
    chunk_size: int | None = None,
) -> list[Trace]:
    """A trace of each sequence `fed`, whose first `num_prompt_tokens` are prefilled and the rest
    decoded one by one. `chunk_size` is how many tokens of a prompt one prefill step takes."""
    requests = _place(fed, num_prompt_tokens, model.mesh.size)
    num_pages = 1 + max(int(request.pages.max()) for request in requests)
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=num_pages, page_size=PAGE_SIZE, dtype=model.dtype
    )
    recorder = _Recorder(requests)
    for batch, rows in _prefill_batches(requests, model.mesh.size, chunk_size):
        cache = recorder.step(steps, cache, batch, rows)
    for batch, rows in _decode_batches(requests, model.mesh.size):
        cache = recorder.step(steps, cache, batch, rows)
    return recorder.traces()


class _Recorder:
    """Runs steps and keeps what each request's rows produced."""

    def __init__(self, requests: Sequence[_Request]):
        self._requests = requests
        self._hidden: list[list[tuple[np.ndarray, ...]]] = [[] for _ in requests]
        self._topk_idx: list[list[tuple[np.ndarray, ...]]] = [[] for _ in requests]
        self._logits: list[list[np.ndarray]] = [[] for _ in requests]

    def step(self, steps: Steps, cache: KVCache, batch: Batch, rows: Sequence[_Rows]) -> KVCache:
        last_hidden, cache, activations = steps.forward_with_activations(cache, batch)
        logits = np.asarray(steps.logits(last_hidden))
        hidden = [np.asarray(layer.astype(np.float32)) for layer in activations.hidden]
        topk_idx = [np.asarray(layer) for layer in activations.topk_idx]
        for of_request in rows:
            request, start = of_request.request, of_request.start
            where = (request.rank, slice(start, start + len(of_request.positions)))
            self._hidden[request.index].append(tuple(layer[where] for layer in hidden))
            self._topk_idx[request.index].append(tuple(layer[where] for layer in topk_idx))
            self._logits[request.index].append(logits[where])
        return cache

    def traces(self) -> list[Trace]:
        return [
            Trace(
                num_prompt_tokens=request.num_prompt_tokens,
                fed=request.fed,
                hidden=tuple(map(np.concatenate, zip(*self._hidden[request.index], strict=True))),
                topk_idx=tuple(
                    map(np.concatenate, zip(*self._topk_idx[request.index], strict=True))
                ),
                logits=np.concatenate(self._logits[request.index]),
            )
            for request in self._requests
        ]


def _place(
    fed: Sequence[np.ndarray], num_prompt_tokens: Sequence[int], num_ranks: int
) -> list[_Request]:
    next_page = [1] * num_ranks  # page 0 is padding's
    requests = []
    for index, (tokens, num_prompt) in enumerate(zip(fed, num_prompt_tokens, strict=True)):
        rank = index % num_ranks
        num_pages = math.ceil(len(tokens) / PAGE_SIZE)
        pages = np.arange(next_page[rank], next_page[rank] + num_pages, dtype=np.int32)
        next_page[rank] += num_pages
        requests.append(
            _Request(
                index=index,
                fed=np.asarray(tokens, np.int32),
                num_prompt_tokens=num_prompt,
                rank=rank,
                row=index // num_ranks,
                pages=pages,
            )
        )
    return requests


def _prefill_batches(
    requests: Sequence[_Request], num_ranks: int, chunk_size: int | None
) -> Iterator[tuple[PrefillBatch, list[_Rows]]]:
    longest = max(request.num_prompt_tokens for request in requests)
    chunk_size = min(chunk_size or longest, longest)
    per_rank = [[r for r in requests if r.rank == rank] for rank in range(num_ranks)]
    # One shape for all chunks: what the first one needs, and every page of a prompt.
    num_tokens = max(
        sum(min(chunk_size, request.num_prompt_tokens) for request in members)
        for members in per_rank
    )
    num_tokens = math.ceil(num_tokens / ROW_MULTIPLE) * ROW_MULTIPLE
    num_pages = max(sum(len(request.pages) for request in members) for members in per_rank)
    for chunk_start in range(0, longest, chunk_size):
        batch = empty_prefill(num_ranks, num_tokens, num_pages)
        rows = []
        for rank, members in enumerate(per_rank):
            token = page = 0
            for request in members:
                end = min(chunk_start + chunk_size, request.num_prompt_tokens)
                positions = np.arange(chunk_start, end, dtype=np.int32)
                if not positions.size:
                    continue
                here = (rank, slice(token, token + len(positions)))
                batch.token_ids[here] = request.fed[positions]
                batch.positions[here] = positions
                batch.slots[here] = request.slots(positions)
                batch.request[here] = request.row
                num_read = math.ceil(end / PAGE_SIZE)
                read = (rank, slice(page, page + num_read))
                batch.page_ids[read] = request.pages[:num_read]
                batch.page_request[read] = request.row
                batch.page_start[read] = np.arange(num_read) * PAGE_SIZE
                rows.append(_Rows(request, token, positions))
                token += len(positions)
                page += num_read
            batch.num_pages[rank] = page
        yield batch, rows


def _decode_batches(
    requests: Sequence[_Request], num_ranks: int
) -> Iterator[tuple[DecodeBatch, list[_Rows]]]:
    num_rows = 1 + max(request.row for request in requests)
    num_pages = max(len(request.pages) for request in requests)
    for step in range(max(len(request.fed) - request.num_prompt_tokens for request in requests)):
        batch = empty_decode(num_ranks, num_rows, num_pages)
        rows = []
        for request in requests:
            position = request.num_prompt_tokens + step
            if position >= len(request.fed):
                continue
            here = (request.rank, request.row)
            batch.token_ids[here] = request.fed[position]
            batch.positions[here] = position
            batch.slots[here] = request.slots(np.asarray(position))
            batch.page_table[here][: len(request.pages)] = request.pages
            rows.append(_Rows(request, request.row, np.asarray([position])))
        yield batch, rows
