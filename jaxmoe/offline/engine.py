"""`OfflineEngine`: static batches of prompts, prefilled in chunks and decoded in one program each.

A batch's shapes are rounded up to a few sizes (`shape_of`), so a file of many lengths compiles few
programs. What a request gets depends on the request alone: the others in its batch, its rank and
the sizes change nothing but the last bits of the arithmetic.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe import kv_cache, sampling, sharding
from jaxmoe.batch import PrefillBatch, empty_prefill
from jaxmoe.checkpoint import load_model
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import num_expert_slots
from jaxmoe.offline.decode import NO_TOKEN, DecodeLoop, DecodeStart, empty_start
from jaxmoe.offline.options import Generation, GenerationOptions, PromptRequest, make_request
from jaxmoe.plan import make_plans, resolve_dtype, resolve_quantization
from jaxmoe.sampling import SamplingBatch
from jaxmoe.step import ShardedModel, Steps, join_ep_group
from jaxmoe.tokenizer import Tokenizer


PAGE_SIZE = 64
MIN_BUCKET = 32
MAX_DISPATCH_TOKENS_PER_RANK = 128
"""Of low-latency dispatch, whose buffers hold every rank's tokens at every expert."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """What a batch's programs are compiled for, besides the engine's own sizes.

    Attributes:
      prompt_tokens, new_tokens: of a request, rounded up.
    """

    prompt_tokens: int
    new_tokens: int

    @property
    def pages_per_request(self) -> int:
        return math.ceil((self.prompt_tokens + self.new_tokens) / PAGE_SIZE)


def shape_of(*requests: PromptRequest) -> BatchShape:
    """The smallest shape these requests fit in."""
    return BatchShape(
        prompt_tokens=_round_up(max(len(request.prompt_ids) for request in requests)),
        new_tokens=_round_up(max(request.max_new_tokens for request in requests)),
    )


def _round_up(size: int) -> int:
    """To a power of two."""
    return max(MIN_BUCKET, 1 << (size - 1).bit_length())


@dataclasses.dataclass
class Statistics:
    """What an engine has done so far. Prefill includes each request's first token."""

    prompts: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0


class OfflineEngine:
    """A loaded model that continues batches of prompts.

    Attributes:
      batch_size: requests of a batch over all ranks; `run_batch` takes up to this many.
      statistics: of all batches so far.
    """

    def __init__(
        self,
        model: ShardedModel,
        tokenizer: Tokenizer | None,
        *,
        batch_size: int = 32,
        chunk_tokens: int | None = None,
        deepep_mode: str = "auto",
        moe_a2a_backend: str = "reference",
        two_batch_overlap: bool = False,
        single_batch_overlap: bool = False,
    ):
        """`chunk_tokens` is what one prefill step takes of each rank at most; None: what suits the
        platform.

        Raises ValueError for a size or mode that makes no sense.
        """
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens()
        for name, value in (("batch_size", batch_size), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.statistics = Statistics()
        self._rows = math.ceil(batch_size / model.mesh.size)
        self._chunk_tokens = chunk_tokens
        prefill, decode = make_plans(
            deepep_mode,
            ep_size=model.ranks.ep_size,
            slots_per_rank=model.slots_per_rank,
            max_dispatch_tokens_per_rank=max(MAX_DISPATCH_TOKENS_PER_RANK, self._rows),
            moe_a2a_backend=moe_a2a_backend,
            two_batch_overlap=two_batch_overlap,
            single_batch_overlap=single_batch_overlap,
            quantization=model.quantization,
        )
        join_ep_group(model, (prefill, decode), max_tokens=max(chunk_tokens, self._rows))
        self._steps = Steps(model, prefill=prefill, decode=decode)
        self._decode = DecodeLoop(model, decode)

    @classmethod
    def load(
        cls,
        model_path: Path | str,
        *,
        ep_size: int | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        num_redundant_experts: int | None = None,
        batch_size: int = 32,
        chunk_tokens: int | None = None,
        deepep_mode: str = "auto",
        moe_a2a_backend: str = "reference",
        two_batch_overlap: bool = False,
        single_batch_overlap: bool = False,
    ) -> "OfflineEngine":
        """Load a model directory, its experts spread over `ep_size` devices (None: all).

        `dtype` and `quantization` are names of `resolve_dtype` and `resolve_quantization`.

        Raises ValueError or FileNotFoundError when the directory or a setting is not usable.
        """
        config = ModelConfig.load(model_path)
        mesh = sharding.make_mesh(len(jax.devices()) if ep_size is None else ep_size)
        num_slots = num_expert_slots(config.n_routed_experts, mesh.size, num_redundant_experts)
        model = load_model(
            model_path,
            mesh,
            dtype=resolve_dtype(dtype, config),
            quantization=resolve_quantization(quantization, config),
            num_slots=num_slots,
        )
        return cls(
            model,
            load_tokenizer(model_path),
            batch_size=batch_size,
            chunk_tokens=chunk_tokens,
            deepep_mode=deepep_mode,
            moe_a2a_backend=moe_a2a_backend,
            two_batch_overlap=two_batch_overlap,
            single_batch_overlap=single_batch_overlap,
        )

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        options: GenerationOptions | None = None,
    ) -> list[Generation]:
        """Continue each prompt, a text or its token ids; results in the order of the prompts.

        Raises ValueError naming the first prompt that cannot be run, before any has been.
        """
        options = options or GenerationOptions()
        requests = [self._request(i, prompt, options) for i, prompt in enumerate(prompts)]
        # Similar lengths together: a batch takes as long as its longest request.
        requests.sort(key=lambda request: (request.max_new_tokens, len(request.prompt_ids)))
        results: dict[int, Generation] = {}
        for start in range(0, len(requests), self.batch_size):
            batch = requests[start : start + self.batch_size]
            for request, result in zip(batch, self.run_batch(batch, options), strict=True):
                results[request.index] = result
        return [results[index] for index in range(len(prompts))]

    def run_batch(
        self, requests: Sequence[PromptRequest], options: GenerationOptions
    ) -> list[Generation]:
        """Continue up to `batch_size` requests; results in their order."""
        if not requests:
            return []
        if len(requests) > self._rows * self.model.mesh.size:
            raise ValueError(
                f"a batch holds at most {self._rows * self.model.mesh.size} requests, "
                f"got {len(requests)}"
            )
        stop_ids = self._stop_ids(options)
        layout = _Layout(requests, self.model.mesh.size, self._rows, shape_of(*requests), options)
        cache = kv_cache.allocate(
            self.config,
            self.model.mesh,
            num_pages=layout.num_pages,
            page_size=PAGE_SIZE,
            dtype=self.model.dtype,
        )

        began = time.perf_counter()
        first_tokens, cache = self._prefill(cache, layout)
        prefilled = time.perf_counter()
        start = layout.decode_start(first_tokens, stop_ids)
        max_steps = layout.shape.new_tokens - 1
        tokens, _ = self._decode(cache, start, stop_ids, max_steps=max_steps)
        tokens = np.concatenate((first_tokens[:, :, None], np.asarray(tokens)), axis=-1)
        ended = time.perf_counter()

        by_request = [tokens[rank, row].tolist() for rank, row in layout.places]
        generated = [ids[: ids.index(NO_TOKEN)] if NO_TOKEN in ids else ids for ids in by_request]
        done = self.statistics
        done.prompts += len(requests)
        done.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        done.generated_tokens += sum(map(len, generated))
        done.decoded_tokens += sum(map(len, generated)) - len(requests)
        done.prefill_seconds += prefilled - began
        done.decode_seconds += ended - prefilled
        return [
            finish(request, ids, options, frozenset(stop_ids.tolist()), self.tokenizer)
            for request, ids in zip(requests, generated, strict=True)
        ]

    def _request(
        self, index: int, prompt: str | Sequence[int], options: GenerationOptions
    ) -> PromptRequest:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer: prompts must be token ids")
            prompt = self.tokenizer.encode(prompt)
        try:
            return make_request(
                index,
                [int(token) for token in prompt],
                options,
                vocab_size=self.config.vocab_size,
                max_tokens=self.config.max_position_embeddings,
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _stop_ids(self, options: GenerationOptions) -> np.ndarray:
        """Padded to a fixed size, so that other stop tokens compile nothing."""
        ids = set(options.stop_token_ids)
        if not options.ignore_eos:
            ids.update(self.config.eos_token_ids)
        padded = np.full(_round_up(max(1, len(ids))), NO_TOKEN, np.int32)
        padded[: len(ids)] = sorted(ids)
        return padded

    def _prefill(
        self, cache: kv_cache.KVCache, layout: "_Layout"
    ) -> tuple[np.ndarray, kv_cache.KVCache]:
        """The first token of each row, [D, B], and the cache with the prompts in it."""
        sampled = []
        for batch, rows, is_last in layout.chunks(self._chunk_tokens):
            hidden, cache = self._steps.forward(cache, batch)
            if is_last.any():
                chosen = self._steps.sample(hidden, jnp.asarray(rows), layout.first_sampling)
                sampled.append((is_last, chosen.token_ids))
        tokens = np.full((self.model.mesh.size, self._rows), NO_TOKEN, np.int32)
        for is_last, token_ids in sampled:
            tokens = np.where(is_last, np.asarray(token_ids), tokens)
        return tokens, cache


class _Layout:
    """Where a batch's requests are: rank, row, pages, and how they are cut into chunks.

    Row b of a rank owns pages 1 + b * W to (b + 1) * W; page 0 is padding's.
    """

    def __init__(
        self,
        requests: Sequence[PromptRequest],
        num_ranks: int,
        num_rows: int,
        shape: BatchShape,
        options: GenerationOptions,
    ):
        self.requests = requests
        self.shape = shape
        self.places = [(i % num_ranks, i // num_ranks) for i in range(len(requests))]
        pages = shape.pages_per_request
        self.num_pages = 1 + num_rows * pages
        self._num_ranks, self._num_rows = num_ranks, num_rows
        self._page_table = 1 + np.arange(num_rows * pages, dtype=np.int32).reshape(num_rows, pages)
        self.first_sampling = self._sampling(options)

    def chunks(self, chunk_tokens: int):
        """Of each step: the batch, the token to sample from and whether it is one, [D, B] both.

        A rank's prompts stand end to end and are cut every so many tokens, wherever that is.
        """
        num_ranks, num_rows, pages = self._num_ranks, self._num_rows, self._page_table.shape[1]
        flat = [self._flat(rank) for rank in range(num_ranks)]
        longest = max(token_ids.size for token_ids, *_ in flat)
        step = min(chunk_tokens, _round_up(longest))
        for start in range(0, longest, step):
            size = min(step, _round_up(longest - start))
            batch = empty_prefill(num_ranks, size, num_rows * pages)
            last = np.zeros((num_ranks, num_rows), np.int32)
            is_last = np.zeros((num_ranks, num_rows), bool)
            for rank, (token_ids, positions, rows, is_end) in enumerate(flat):
                here = slice(start, start + size)
                position, row = positions[here], rows[here]
                batch.token_ids[rank, : row.size] = token_ids[here]
                batch.positions[rank, : row.size] = position
                batch.request[rank, : row.size] = row
                page = self._page_table[row, position // PAGE_SIZE]
                batch.slots[rank, : row.size] = page * PAGE_SIZE + position % PAGE_SIZE
                ends = np.flatnonzero(is_end[here])
                last[rank, row[ends]] = ends
                is_last[rank, row[ends]] = True
                self._list_pages(batch, rank, position, row)
            yield batch, last, is_last

    def decode_start(self, first_tokens: np.ndarray, stop_ids: np.ndarray) -> DecodeStart:
        start = empty_start(self._num_ranks, self._num_rows, self._page_table.shape[1])
        start.page_table[:] = self._page_table
        for place, request in zip(self.places, self.requests, strict=True):
            start.token_ids[place] = first_tokens[place]
            start.positions[place] = len(request.prompt_ids)
            if first_tokens[place] not in stop_ids:
                start.remaining[place] = request.max_new_tokens - 1
        return dataclasses.replace(start, sampling=self.first_sampling)

    def _flat(self, rank: int) -> tuple[np.ndarray, ...]:
        """Token ids, positions, rows and which are a prompt's last, of a rank's prompts."""
        mine = self.requests[rank :: self._num_ranks]
        lengths = [len(request.prompt_ids) for request in mine]
        ends = np.cumsum(lengths, dtype=np.int64)
        token_ids = np.zeros(sum(lengths), np.int32)
        for request, end, length in zip(mine, ends, lengths, strict=True):
            token_ids[end - length : end] = request.prompt_ids
        rows = np.repeat(np.arange(len(mine), dtype=np.int32), lengths)
        positions = np.arange(token_ids.size, dtype=np.int32) - np.repeat(
            ends - lengths, lengths
        ).astype(np.int32)
        is_end = np.zeros(token_ids.size, bool)
        is_end[ends - 1] = True
        return token_ids, positions, rows, is_end

    def _list_pages(
        self, batch: PrefillBatch, rank: int, position: np.ndarray, row: np.ndarray
    ) -> None:
        """The pages a chunk's requests fill up to the chunk's end."""
        at = 0
        for request in np.unique(row):
            count = int(position[row == request].max()) // PAGE_SIZE + 1
            listed = slice(at, at + count)
            batch.page_ids[rank, listed] = self._page_table[request, :count]
            batch.page_request[rank, listed] = request
            batch.page_start[rank, listed] = np.arange(count, dtype=np.int32) * PAGE_SIZE
            at += count
        batch.num_pages[rank] = at

    def _sampling(self, options: GenerationOptions) -> SamplingBatch:
        batch = sampling.greedy_batch(self._num_ranks, self._num_rows)
        batch.top_k[:], batch.top_p[:], batch.min_p[:] = options.top_k, options.top_p, options.min_p
        for place, request in zip(self.places, self.requests, strict=True):
            batch.temperature[place] = request.temperature
            batch.seed[place] = (request.seed & 0xFFFFFFFF, request.seed >> 32)
            batch.position[place] = len(request.prompt_ids)
        return batch


def finish(
    request: PromptRequest,
    token_ids: Sequence[int],
    options: GenerationOptions,
    stop_ids: frozenset[int],
    tokenizer: Tokenizer | None,
) -> Generation:
    """What the generated tokens are to the user: text, cut at the first stop string."""
    is_stopped = token_ids[-1] in stop_ids
    text = None
    if tokenizer is not None:
        visible = token_ids[:-1] if is_stopped else token_ids
        text = tokenizer.decode(visible)
        found = [at for at in (text.find(stop) for stop in options.stop) if at >= 0]
        if found:
            text = text[: min(found)]
            is_stopped = True
            token_ids = token_ids[: _tokens_until_stop(visible, options.stop, tokenizer)]
    return Generation(
        text=text,
        token_ids=tuple(token_ids),
        finish_reason="stop" if is_stopped else "length",
        prompt_tokens=len(request.prompt_ids),
    )


def _tokens_until_stop(token_ids: Sequence[int], stops: Sequence[str], tokenizer: Tokenizer) -> int:
    """The fewest first tokens whose text has a stop string in it."""
    decoder, text = tokenizer.text_decoder(), ""
    for count, token in enumerate(token_ids, start=1):
        text += decoder.push(token)
        if any(stop in text for stop in stops):
            return count
    return len(token_ids)


def default_chunk_tokens() -> int:
    # Every token of a chunk is scored against all pages of the chunk's requests. A CPU pays for
    # that with time and gains nothing from wider products; an accelerator is the other way round.
    return 128 if jax.default_backend() == "cpu" else 2048


def load_tokenizer(model_path: Path | str) -> Tokenizer | None:
    """The model's tokenizer, None if it has none."""
    if not (Path(model_path) / "tokenizer.json").is_file():
        return None
    return Tokenizer.load(model_path)
