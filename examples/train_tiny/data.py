"""Training batches through Grain: generated documents, rendered as chats, packed into rows.

`make_dataset` gives batches without end. Every batch is a function of the seed and its place alone,
whatever the number of workers, so a run resumes exactly from the iterator's `get_state`.

Every row starts with a document, holds whole documents end to end and cuts only its last one short;
no token is padding, and none lacks the beginning of its document.
"""

import dataclasses
import sys
from pathlib import Path

import grain
import numpy as np
import tokenizers
from absl import flags

from jaxmoe.tasks import Document, train_document


DOCUMENTS_PER_BATCH = 1 << 20  # more than any batch takes, so that batches share no document


@dataclasses.dataclass
class BatchSource:
    """Random access to the batches of one seed. See `make_dataset` for what is in them."""

    tokenizer_path: str
    seed: int
    batch_size: int
    sequence_length: int
    prompt_weight: float = 0.1

    def __post_init__(self) -> None:
        self._renderer: Renderer | None = None  # made in the worker that reads

    def __len__(self) -> int:
        return sys.maxsize // DOCUMENTS_PER_BATCH // 8

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self._renderer is None:
            self._renderer = Renderer(self.tokenizer_path, self.prompt_weight)
        shape = (self.batch_size, self.sequence_length + 1)
        tokens = np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        segment_ids = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        document_index = index * DOCUMENTS_PER_BATCH
        for row in range(self.batch_size):
            start, segment = 0, 1
            while start < shape[1]:
                ids, document_weights = self._renderer(train_document(self.seed, document_index))
                stop = min(start + len(ids), shape[1])
                tokens[row, start:stop] = ids[: stop - start]
                weights[row, start:stop] = document_weights[: stop - start]
                segment_ids[row, start:stop] = segment
                positions[row, start:stop] = np.arange(stop - start)
                start, segment = stop, segment + 1
                document_index += 1
        return {
            "tokens": tokens,
            "loss_mask": weights[:, 1:],
            "segment_ids": segment_ids[:, :-1],
            "positions": positions[:, :-1],
        }


class Renderer:
    """Documents to token ids, each with the weight of predicting it; the first is never predicted.

    Gives what the chat template gives, without its cost.
    """

    def __init__(self, tokenizer_path: str, prompt_weight: float):
        path = Path(tokenizer_path)
        self._backend = tokenizers.Tokenizer.from_file(
            str(path / "tokenizer.json" if path.is_dir() else path)
        )
        self._prompt_weight = prompt_weight
        self._begin_id = self._token_id("<|begin|>")
        self._end_id = self._token_id("<|end|>")
        self._role_ids = {
            role: self._token_id(f"<|{role}|>") for role in ("system", "user", "assistant")
        }

    def __call__(self, document: Document) -> tuple[list[int], list[float]]:
        ids, weights = [self._begin_id], [0.0]
        for role, text in document:
            text_ids = self._backend.encode(text, add_special_tokens=False).ids
            if role == "text":
                weight = 1.0
            else:
                ids.append(self._role_ids[role])
                weights.append(0.0)  # whose turn it is, the template decides
                weight = 1.0 if role == "assistant" else self._prompt_weight
            ids += text_ids
            ids.append(self._end_id)
            weights += [weight] * (len(text_ids) + 1)
        return ids, weights

    def _token_id(self, token: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return token_id


def make_dataset(
    tokenizer_path: str | Path,
    *,
    seed: int,
    batch_size: int,
    sequence_length: int,
    num_workers: int,
    prompt_weight: float = 0.1,
    per_worker_buffer_size: int = 8,
) -> grain.IterDataset[dict[str, np.ndarray]]:
    """Batches without end, each a dictionary of arrays:

    - `tokens` int32 [batch_size, sequence_length + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`;
    - `loss_mask` float32 [batch_size, sequence_length]: weight of each target: 1 in the assistant's
      answers and in plain text, `prompt_weight` in questions, 0 for role marks and for targets that
      begin another document;
    - `segment_ids` int32, same shape: number of the input's document in its row, from 1;
    - `positions` int32, same shape: place of the input in its document, from 0.

    Args:
      tokenizer_path: tokenizer.json or its folder.
      num_workers: processes that make batches; 0 makes them in this one.
    """
    source = BatchSource(str(tokenizer_path), seed, batch_size, sequence_length, prompt_weight)
    dataset = grain.MapDataset.source(source).to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    )
    if num_workers:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain's workers read flags
        dataset = dataset.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=num_workers, per_worker_buffer_size=per_worker_buffer_size
            )
        )
    return dataset
