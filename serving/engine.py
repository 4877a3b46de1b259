"""Runs scheduled batches: pads them to compiled shapes, steps, brings the tokens back to the host.

The engine owns the cache. After `warmup` it compiles nothing: every batch the scheduler can make
within `EngineLimits` fits one of the shapes compiled there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from custom_calls import deep_gemm
from jaxmoe import batch as batches
from jaxmoe import kv_cache, sampling, sharding
from jaxmoe.eplb.placement import ExpertPlacement
from jaxmoe.plan import ExecutionPlan
from jaxmoe.sampling import Sampled
from jaxmoe.step import ShardedModel, Steps
from serving.expert_load import ExpertLoad
from serving.overlap import TwoBatchLimits, TwoBatchOverlap
from serving.peers import Peers
from serving.request import Request, SamplingParams, TokenLogprob
from serving.roles import Role
from serving.scheduler import Limits, ScheduledBatch, ScheduledDecode, ScheduledPrefill, StepPhase


BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """Sizes the engine is compiled and allocated for, per rank.

    Attributes:
      max_running: requests that decode together.
      chunk_tokens: tokens of a prefill step.
      context_length: tokens of the longest sequence, prompt and output.
      page_size: tokens of a page.
      num_pages: pages of the pool, page 0 included.
    """

    max_running: int
    chunk_tokens: int
    context_length: int
    page_size: int
    num_pages: int

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.context_length // self.page_size)

    @property
    def chunk_pages(self) -> int:
        # Room for the longest sequence, and for many short prompts in one chunk.
        return self.pages_per_sequence + self.max_running

    @property
    def scheduler_limits(self) -> Limits:
        return Limits(self.max_running, self.chunk_tokens, self.chunk_pages)

    @property
    def block_pages(self) -> int:
        """Pages that are read or written together when caches are transferred; of all workers with
        pages of this size."""
        return max(2, BLOCK_TOKENS // self.page_size)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Token counts a prefill step is compiled for: the chunk and an eighth of it."""
        return tuple(sorted({max(1, self.chunk_tokens // 8), self.chunk_tokens}))

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Batch sizes a decode step is compiled for: powers of two up to `max_running`."""
        powers = {2**i for i in range(self.max_running.bit_length())}
        return tuple(sorted(p for p in powers | {self.max_running} if p <= self.max_running))


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step did for one request.

    Attributes:
      num_computed: tokens of the request that are in the cache now.
      token: the sampled token, None after a chunk that was not the last.
      prompt_logprobs: by position in the prompt, those that the request wants.
    """

    request: Request
    num_computed: int
    token: TokenLogprob | None
    prompt_logprobs: dict[int, TokenLogprob]


class Engine:
    """Attributes:
    load: what its steps count of the tokens that experts get.
    topk_idx: the logical experts that the last step's tokens chose, [D, T, K] of each MoE layer.
    role: which of a request's steps it takes; it is compiled for no others.
    """

    def __init__(
        self,
        model: ShardedModel,
        limits: EngineLimits,
        *,
        prefill: ExecutionPlan,
        decode: ExecutionPlan,
        cache_dtype: DTypeLike | None = None,
        two_batch_limits: TwoBatchLimits | None = None,
        role: Role = Role.UNIFIED,
    ):
        self.limits = limits
        self.role = role
        self.num_ranks = model.mesh.size
        self._cache_dtype = model.dtype if cache_dtype is None else cache_dtype
        plans = {StepPhase.PREFILL: prefill, StepPhase.DECODE: decode}
        self.overlap = TwoBatchOverlap(
            two_batch_limits or TwoBatchLimits(),
            [phase for phase in role.phases if plans[phase].is_two_batch],
        )
        self._steps = Steps(model, prefill=prefill, decode=decode)
        self._cache = self._empty_cache()
        self.load = ExpertLoad(lambda: self.model)
        self.topk_idx: tuple[jax.Array, ...] = ()

    @property
    def model(self) -> ShardedModel:
        return self._steps.model

    def replace_experts(self, params: nnx.State, placement: ExpertPlacement) -> None:
        """Step with this placement from now on, and with these parameters, whose experts lie so.

        Compiles nothing: sizes must be as before.
        """
        self.load.read()  # of the old slots
        self._steps.model = dataclasses.replace(
            self.model,
            params=params,
            placement=jax.device_put(placement, sharding.replicated(self.model.mesh)),
        )

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def reset_cache(self) -> None:
        """A new, empty cache; whatever the old one held is gone."""
        del self._cache  # first: two may not fit
        self._cache = self._empty_cache()
        self.load.reset()

    def _empty_cache(self) -> kv_cache.KVCache:
        return kv_cache.allocate(
            self.model.config,
            self.model.mesh,
            num_pages=self.limits.num_pages,
            page_size=self.limits.page_size,
            dtype=self._cache_dtype,
        )

    def warmup(
        self,
        peers: Peers,
        progress: Callable[[str, int, int], None] = lambda what, i, n: None,
    ) -> None:
        """Compile every shape; `progress(what, i, n)` is called before each of the n programs.

        Kernels that the programs launch are compiled before, side by side. Members compile at
        different speed but run each program together.
        """
        for _, arrays, is_split in self._batches():
            self._steps.trace_forward(self._cache, arrays, self.load.counters, is_split=is_split)
        deep_gemm.wait(progress=True)
        programs = list(self._programs())
        for i, (what, run) in enumerate(programs):
            progress(what, i, len(programs))
            peers.agree((i, len(programs)))
            jax.block_until_ready(run())
        for phase, sizes in self._sizes.items():
            self.overlap.measure(phase, sizes, partial(self._run_full, phase), peers)

    def run(self, batch: ScheduledBatch, size: int) -> list[StepResult]:
        """One step, padded to what `size` tokens (prefill) or rows (decode) of a rank need.

        `size` is at least the batch's own. The requests' own fields are read, never changed. The
        step is over when this returns, so that its failure is not taken for the next one's.
        """
        if isinstance(batch, ScheduledPrefill):
            return self._run_prefill(batch, _fitting(size, self.limits.prefill_sizes))
        return self._run_decode(batch, _fitting(size, self.limits.decode_sizes))

    @property
    def block(self) -> jax.ShapeDtypeStruct:
        """Of a rank's pages in `read_pages` and `write_pages`, [1, n, L, page_size, latent]."""
        layer = self._cache.latent[0]
        shape = (1, self.limits.block_pages, len(self._cache.latent), *layer.shape[2:])
        return jax.ShapeDtypeStruct(shape, layer.dtype)

    def placed_on(self, rank: int) -> SingleDeviceSharding:
        """On the rank's device, where its blocks must be."""
        return SingleDeviceSharding(self.model.mesh.devices.flat[rank])

    def read_pages(self, reads: Sequence[tuple[int, Sequence[int]]]) -> list[jax.Array]:
        """Copies of pages of the cache, for each (rank, at most `block_pages` of its pages) a block
        on the rank's device that begins with them. Does not wait for the copies."""
        blocks: dict[int, jax.Array] = {}
        for indices in _rounds([rank for rank, _ in reads]):
            copies = self._steps.read_pages(
                self._cache, self._page_ids([reads[index] for index in indices])
            )
            of_rank = {shard.index[0].start or 0: shard.data for shard in copies.addressable_shards}
            blocks |= {index: of_rank[reads[index][0]] for index in indices}
        return [blocks[index] for index in range(len(reads))]

    def write_pages(self, writes: Sequence[tuple[int, Sequence[int], jax.Array]]) -> None:
        """Replace pages of the cache: for each (rank, its pages, block on its device) with the
        first ones of the block."""
        for indices in _rounds([rank for rank, _, _ in writes]):
            parts = [writes[index] for index in indices]
            blocks = self._no_blocks | {rank: block for rank, _, block in parts}
            block = self.block
            pages = jax.make_array_from_single_device_arrays(
                (self.num_ranks, *block.shape[1:]),
                sharding.per_rank(self.model.mesh),
                [blocks[rank] for rank in range(self.num_ranks)],
            )
            page_ids = self._page_ids([(rank, pages) for rank, pages, _ in parts])
            self._cache = self._steps.write_pages(self._cache, page_ids, pages)

    def _page_ids(self, pages_of: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
        """[D, block_pages], page 0 where there is none."""
        page_ids = np.zeros((self.num_ranks, self.limits.block_pages), np.int32)
        for rank, pages in pages_of:
            page_ids[rank, : len(pages)] = pages
        return page_ids

    @functools.cached_property
    def _no_blocks(self) -> dict[int, jax.Array]:
        """For the ranks that a write leaves as they are."""
        zeros = np.zeros(self.block.shape, self.block.dtype)
        return {rank: jax.device_put(zeros, self.placed_on(rank)) for rank in range(self.num_ranks)}

    def _run_prefill(self, batch: ScheduledPrefill, size: int) -> list[StepResult]:
        limits = self.limits
        arrays = batches.empty_prefill(self.num_ranks, size, limits.chunk_pages)
        rows = np.zeros((self.num_ranks, limits.max_running), np.int32)
        sampled_rows: list[list[Request]] = [[] for _ in batch.chunks]
        targets = np.full((self.num_ranks, size), -1, np.int32)
        rows_of: dict[Request, np.ndarray] = {}
        places = self.overlap.place(batch, size)
        for rank, chunks in enumerate(batch.chunks):
            token, page = 0, 0
            for index, chunk in enumerate(chunks):
                request, count = chunk.request, chunk.stop - chunk.start
                span = places[rank][token : token + count]
                positions = np.arange(chunk.start, chunk.stop, dtype=np.int32)
                arrays.token_ids[rank, span] = request.tokens(chunk.start, chunk.stop)
                arrays.positions[rank, span] = positions
                arrays.slots[rank, span] = self._slots(request, positions)
                arrays.request[rank, span] = index
                num_pages = -(-chunk.stop // limits.page_size)
                page_span = slice(page, page + num_pages)
                arrays.page_ids[rank, page_span] = request.pages[:num_pages]
                arrays.page_request[rank, page_span] = index
                arrays.page_start[rank, page_span] = np.arange(num_pages) * limits.page_size
                if request.params.prompt_logprobs:
                    following = request.tokens(chunk.start + 1, chunk.stop + 1)
                    targets[rank, span[: len(following)]] = following
                rows_of[request] = span
                token, page = token + count, page + num_pages
                if chunk.is_last:
                    rows[rank, len(sampled_rows[rank])] = span[-1]
                    sampled_rows[rank].append(request)
            arrays.num_pages[rank] = page

        hidden = self._forward(arrays)
        tokens = self._sample(hidden, rows, sampled_rows)
        scores = None
        if (targets >= 0).any():
            scores = [np.asarray(x) for x in self._steps.score(hidden, targets)]
        results = []
        for rank, chunks in enumerate(batch.chunks):
            for chunk in chunks:
                prompt_logprobs = {}
                if scores is not None and chunk.request.params.prompt_logprobs:
                    # The state of position p scores the token of position p + 1.
                    last = min(chunk.stop, len(chunk.request.prompt_ids) - 1)
                    first = max(chunk.start, chunk.request.params.prompt_logprobs_start - 1)
                    for position in range(first, last):
                        row = rows_of[chunk.request][position - chunk.start]
                        logprob, top_ids, top_logprobs = (x[rank, row] for x in scores)
                        prompt_logprobs[position + 1] = _logprob(
                            targets[rank, row], logprob, top_ids, top_logprobs, chunk.request.params
                        )
                results.append(
                    StepResult(
                        chunk.request, chunk.stop, tokens.get(chunk.request), prompt_logprobs
                    )
                )
        return results

    def _run_decode(self, batch: ScheduledDecode, size: int) -> list[StepResult]:
        limits = self.limits
        arrays = batches.empty_decode(self.num_ranks, size, limits.pages_per_sequence)
        rows = np.zeros((self.num_ranks, size), np.int32)
        places = self.overlap.place(batch, size)
        for rank, requests in enumerate(batch.requests):
            rows[rank, : len(requests)] = places[rank]
            for row, request in zip(places[rank], requests, strict=True):
                position = request.num_tokens - 1
                arrays.token_ids[rank, row] = request.output_ids[-1]
                arrays.positions[rank, row] = position
                arrays.slots[rank, row] = self._slots(request, np.asarray([position]))[0]
                arrays.page_table[rank, row, : len(request.pages)] = request.pages
        hidden = self._forward(arrays)
        tokens = self._sample(hidden, rows, batch.requests)
        return [
            StepResult(request, request.num_tokens, token, {}) for request, token in tokens.items()
        ]

    def _forward(self, arrays: batches.Batch, is_split: bool | None = None) -> jax.Array:
        """A step on the engine's cache, cut in two where that is better unless it is said."""
        if is_split is None:
            is_split = self.overlap.is_split(_phase(arrays), arrays.token_ids.shape[1])
        hidden, self._cache, counters, self.topk_idx = self._steps.forward_with_load(
            self._cache, self.load.counters, arrays, is_split=is_split
        )
        self.load.took(counters, int((arrays.positions >= 0).sum()))
        return hidden

    def _slots(self, request: Request, positions: np.ndarray) -> np.ndarray:
        pages = np.asarray(request.pages, np.int32)[positions // self.limits.page_size]
        return pages * self.limits.page_size + positions % self.limits.page_size

    def _sample(
        self, hidden: jax.Array, rows: np.ndarray, requests: list[list[Request]]
    ) -> dict[Request, TokenLogprob]:
        """A token for each request from its row: `rows[rank, i]` belongs to `requests[rank][i]`."""
        if not any(requests):
            jax.block_until_ready(hidden)
            return {}
        sampled = self._steps.sample(
            hidden, rows, *_sampling_arrays(rows.shape, requests, self.model.config.vocab_size)
        )
        host = jax.tree.map(np.asarray, sampled)
        return {
            request: _logprob(
                host.token_ids[rank, row],
                host.logprobs[rank, row],
                host.top_ids[rank, row],
                host.top_logprobs[rank, row],
                request.params,
            )
            for rank, of_rank in enumerate(requests)
            for row, request in enumerate(of_rank)
        }

    @property
    def _sizes(self) -> dict[StepPhase, tuple[int, ...]]:
        limits = self.limits
        sizes = {StepPhase.PREFILL: limits.prefill_sizes, StepPhase.DECODE: limits.decode_sizes}
        return {phase: sizes[phase] for phase in self.role.phases}

    def _empty(self, phase: StepPhase, size: int) -> batches.Batch:
        if phase is StepPhase.PREFILL:
            return batches.empty_prefill(self.num_ranks, size, self.limits.chunk_pages)
        return batches.empty_decode(self.num_ranks, size, self.limits.pages_per_sequence)

    def _run_full(self, phase: StepPhase, size: int, is_split: bool) -> None:
        """A step all of whose rows have a token, for measurements; it overwrites the cache."""
        arrays = batches.fill(
            self._empty(phase, size),
            page_size=self.limits.page_size,
            num_pages=self.limits.num_pages,
            vocab_size=self.model.config.vocab_size,
        )
        jax.block_until_ready(self._forward(arrays, is_split))

    def _batches(self) -> Iterator[tuple[str, batches.Batch, bool]]:
        """A batch of every shape that is stepped, each way that it may be."""
        for phase, sizes in self._sizes.items():
            unit = "tokens" if phase is StepPhase.PREFILL else "requests"
            for size in sizes:
                for is_split in self.overlap.ways(phase, size):
                    what = f"{phase.value} of {size} {unit}{' in halves' if is_split else ''}"
                    yield what, self._empty(phase, size), is_split

    def _programs(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Every program `run` can need, as (what it is, a call that compiles it).

        Each runs on what a step really returned: a compiled program is found again by where its
        arguments live, not by their shapes alone.
        """
        limits, ranks, vocab = self.limits, self.num_ranks, self.model.config.vocab_size
        hidden: list[jax.Array] = []

        def forward(arrays: batches.Batch, is_split: bool) -> jax.Array:
            hidden[:] = [self._forward(arrays, is_split)]
            return hidden[0]

        def sample(rows: int, with_bias: bool) -> Sampled:
            bias = np.zeros((ranks, rows, vocab), np.float32) if with_bias else None
            greedy = sampling.greedy_batch(ranks, rows)
            return self._steps.sample(hidden[0], np.zeros((ranks, rows), np.int32), greedy, bias)

        def score(size: int) -> object:
            return self._steps.score(hidden[0], np.full((ranks, size), -1, np.int32))

        for what, arrays, is_split in self._batches():
            yield what, partial(forward, arrays, is_split)
            size = arrays.token_ids.shape[1]
            if isinstance(arrays, batches.PrefillBatch):
                yield f"scores of {size} tokens", partial(score, size)
                yield "first tokens", partial(sample, limits.max_running, False)
                yield "first tokens with bias", partial(sample, limits.max_running, True)
            else:
                yield "next tokens", partial(sample, size, False)
                yield "next tokens with bias", partial(sample, size, True)
        if self.role is Role.PREFILL:
            yield "pages to send", lambda: self.read_pages([(0, [])])
        if self.role is Role.DECODE:
            yield "pages that arrive", lambda: self.write_pages([(0, [], self._no_blocks[0])])


def _phase(arrays: batches.Batch) -> StepPhase:
    return StepPhase.PREFILL if isinstance(arrays, batches.PrefillBatch) else StepPhase.DECODE


def _rounds(ranks: Sequence[int]) -> list[list[int]]:
    """The indices of `ranks` in as few lists as have no rank twice."""
    rounds: list[list[int]] = []
    counts: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        counts[rank] = round_of_it = counts.get(rank, -1) + 1
        if round_of_it == len(rounds):
            rounds.append([])
        rounds[round_of_it].append(index)
    return rounds


def _fitting(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest compiled size that holds `count`."""
    return next(size for size in sizes if size >= count)


def _sampling_arrays(
    shape: tuple[int, int], requests: list[list[Request]], vocab_size: int
) -> tuple[sampling.SamplingBatch, np.ndarray | None]:
    """The rows' sampling parameters, and their logit edits if any row has some."""
    arrays = sampling.greedy_batch(*shape)
    edits = any(request.params.edits_logits for of_rank in requests for request in of_rank)
    bias = np.zeros((*shape, vocab_size), np.float32) if edits else None
    for rank, of_rank in enumerate(requests):
        for row, request in enumerate(of_rank):
            params = request.params
            arrays.temperature[rank, row] = params.temperature
            arrays.top_k[rank, row] = params.top_k
            arrays.top_p[rank, row] = params.top_p
            arrays.min_p[rank, row] = params.min_p
            arrays.seed[rank, row] = (params.seed & 0xFFFFFFFF, params.seed >> 32)
            arrays.position[rank, row] = request.num_tokens
            arrays.num_top_logprobs[rank, row] = params.num_top_logprobs
            if bias is not None and params.edits_logits:
                bias[rank, row] = logit_edits(request, vocab_size)
    return arrays, bias


def logit_edits(request: Request, vocab_size: int) -> np.ndarray:
    """What is added to a request's logits, [V]: its bias less its penalties, as OpenAI defines
    them."""
    params = request.params
    edits = np.zeros(vocab_size, np.float32)
    for token, value in params.logit_bias.items():
        edits[token] += value
    if params.has_penalties and request.output_ids:
        counts = np.bincount(request.output_ids, minlength=vocab_size)
        edits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return edits


def _logprob(
    token_id: np.integer,
    logprob: np.floating,
    top_ids: np.ndarray,
    top_logprobs: np.ndarray,
    params: SamplingParams,
) -> TokenLogprob:
    top = zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)
    return TokenLogprob(int(token_id), float(logprob), tuple(top)[: params.num_top_logprobs])
