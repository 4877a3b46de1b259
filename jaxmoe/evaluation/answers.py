"""Where answers come from: the offline engine or transformers. A server's are in `client.py`.

An answerer takes questions, each the only message of a conversation, and gives answers as they are
ready, in any order, each with its question's index.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp

from jaxmoe.config import ModelConfig
from jaxmoe.offline.engine import OfflineEngine
from jaxmoe.offline.options import GenerationOptions, PromptRequest, make_request
from jaxmoe.reference.torch_generate import TorchGenerator
from jaxmoe.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for a question.

    Attributes:
      text: None if nothing did; `error` then says why.
    """

    text: str | None
    completion_tokens: int = 0
    error: str | None = None


class Answerer(Protocol):
    """What answers.

    Attributes:
      backend, settings: what a report says of it, by the names of `report.Settings`.
    """

    backend: str
    settings: Mapping[str, Any]

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, Answer]]: ...


class EngineAnswerer:
    """The offline engine, greedy."""

    backend = "jax"

    def __init__(
        self,
        model_path: Path | str,
        *,
        ep_size: int | None,
        num_redundant_experts: int | None,
        deepep_mode: str,
        moe_a2a_backend: str,
        two_batch_overlap: bool,
        single_batch_overlap: bool,
        dtype: str,
        quantization: str | None,
        batch_size: int,
        max_new_tokens: int,
    ):
        self._options = GenerationOptions(max_new_tokens=max_new_tokens)
        self._engine = OfflineEngine.load(
            model_path,
            ep_size=ep_size,
            dtype=dtype,
            quantization=quantization,
            num_redundant_experts=num_redundant_experts,
            batch_size=batch_size,
            deepep_mode=deepep_mode,
            moe_a2a_backend=moe_a2a_backend,
            two_batch_overlap=two_batch_overlap,
            single_batch_overlap=single_batch_overlap,
        )
        self.model = self._engine.model
        self.tokenizer = Tokenizer.load(model_path)  # raises where the engine goes without one
        how = self.model.quantization
        self.settings: Mapping[str, Any] = {
            "dtype": jnp.dtype(self.model.dtype).name,
            "quantization": None if how is None else how.value,
            "ep_size": self.model.mesh.size,
            "num_redundant_experts": self.model.num_slots - self._engine.config.n_routed_experts,
            "deepep_mode": deepep_mode,
            "moe_a2a_backend": moe_a2a_backend,
            "two_batch_overlap": two_batch_overlap,
            "single_batch_overlap": single_batch_overlap,
            "device": self.model.mesh.devices.flat[0].device_kind,
        }

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, Answer]]:
        engine = self._engine
        requests = _requests(questions, self.tokenizer, engine.config, self._options)
        for batch in _batches(requests, engine.batch_size):
            generations = engine.run_batch(batch, self._options)
            for request, generation in zip(batch, generations, strict=True):
                yield request.index, Answer(generation.text, generation.completion_tokens)


class TorchAnswerer:
    """transformers on the CPU, greedy."""

    backend = "torch"

    def __init__(self, model_path: Path | str, *, dtype: str, batch_size: int, max_new_tokens: int):
        self._options = GenerationOptions(max_new_tokens=max_new_tokens)
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        self._batch_size = batch_size
        self._config = ModelConfig.load(model_path)
        self._tokenizer = Tokenizer.load(model_path)
        dtype = "float32" if dtype == "auto" else dtype
        self.settings: Mapping[str, Any] = {"dtype": dtype, "device": "cpu"}
        self._generator = TorchGenerator(model_path, dtype=dtype)

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, Answer]]:
        requests = _requests(questions, self._tokenizer, self._config, self._options)
        end_ids = self._config.eos_token_ids
        for batch in _batches(requests, self._batch_size):
            generated = self._generator.generate(
                [request.prompt_ids for request in batch],
                max_new_tokens=self._options.max_new_tokens,
                end_ids=end_ids,
            )
            for request, ids in zip(batch, generated, strict=True):
                visible = ids[:-1] if ids[-1] in end_ids else ids
                yield request.index, Answer(self._tokenizer.decode(visible), len(ids))


def _requests(
    questions: Sequence[str],
    tokenizer: Tokenizer,
    config: ModelConfig,
    options: GenerationOptions,
) -> list[PromptRequest]:
    return [
        make_request(
            index,
            tokenizer.apply_chat_template([{"role": "user", "content": question}]),
            options,
            vocab_size=config.vocab_size,
            max_tokens=config.max_position_embeddings,
        )
        for index, question in enumerate(questions)
    ]


def _batches(requests: list[PromptRequest], batch_size: int) -> Iterator[list[PromptRequest]]:
    """Similar lengths together: they share programs, and little of a batch is padding."""
    ordered = sorted(requests, key=lambda request: len(request.prompt_ids))
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]
