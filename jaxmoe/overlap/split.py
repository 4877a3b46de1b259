"""Where a batch is cut in two micro-batches, and where its tokens stand then. Host logic.

A compiled step cuts its padded tokens in the middle; what is decided here is which tokens are
before it. The rules are SGLang's (github.com/sgl-project/sglang, `two_batch_overlap`).
"""

from collections.abc import Sequence

import numpy as np


DEFAULT_THRESHOLD = 0.48


def split_sequences(lengths: Sequence[int], threshold: float = DEFAULT_THRESHOLD) -> int:
    """How many of the tokens of sequences that stand end to end go to the first half.

    Between two sequences, where the halves differ least; the later place if two are as good. If a
    half would have less than `threshold` of the tokens, in the middle instead, inside a sequence,
    whose second part then reads what the first has written to the cache. 0: there is nothing to
    overlap with.

    Raises ValueError for a threshold that is not between 0 and 0.5.
    """
    if not 0 <= threshold <= 0.5:
        raise ValueError(f"threshold must be between 0 and 0.5, got {threshold}")
    total = sum(lengths)
    best, before, left = total, 0, 0
    for length in lengths:
        difference = abs(total - 2 * before)
        if difference > best:
            break
        best, left = difference, before
        before += length
    if threshold * total <= left <= (1 - threshold) * total:
        return left
    middle = total // 2
    sequence = int(np.searchsorted(np.cumsum(lengths), middle, side="right")) if lengths else 0
    return left if sequence + 1 > middle else middle


def split_requests(num_requests: int) -> int:
    """How many of the requests of a decode step go to the first half; 0: nothing to overlap."""
    return num_requests // 2


def place(num_tokens: int, left: int, size: int) -> np.ndarray:
    """The row of each token when `left` of them go to the first half of `size` rows.

    More or fewer do if a half has no room for the rest.
    """
    first = size // 2
    left = max(min(left, first), num_tokens - (size - first))
    row = np.arange(num_tokens)
    return np.where(row < left, row, row - left + first)
