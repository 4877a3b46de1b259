"""Where a batch is cut: the known cases, and that no token is lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.overlap.split import place, split_requests, split_sequences


def halves(lengths, left):
    """The parts of the sequences on each side."""
    parts, before = ([], []), 0
    for length in lengths:
        on_left = min(max(left - before, 0), length)
        parts[0].append(on_left)
        parts[1].append(length - on_left)
        before += length
    return tuple([part for part in side if part] for side in parts)


@pytest.mark.parametrize(
    ("lengths", "threshold", "expected"),
    [
        ([3072], 0.48, ([1536], [1536])),
        ([1], 0.48, ([], [1])),
        ([2], 0.48, ([1], [1])),
        ([4096, 128], 0.48, ([2112], [1984, 128])),
        ([128, 4096], 0.48, ([128, 1984], [2112])),
        ([10, 20, 30, 40], 0.48, ([10, 20, 20], [10, 40])),
        ([5, 5, 5], 0.48, ([5, 2], [3, 5])),
        ([7, 1, 1, 1], 0.48, ([5], [2, 1, 1, 1])),
        ([100] * 4, 0.48, ([100, 100], [100, 100])),
        ([10, 20, 30, 40], 0, ([10, 20, 30], [40])),
        ([5, 5, 5], 0, ([5, 5], [5])),
        ([3072], 0, ([], [3072])),
        ([], 0.48, ([], [])),
    ],
)
def test_known_cuts(lengths, threshold, expected):
    assert halves(lengths, split_sequences(lengths, threshold)) == expected


@pytest.mark.parametrize(("requests", "left"), [(0, 0), (1, 0), (2, 1), (5, 2), (64, 32)])
def test_requests_are_halved(requests, left):
    assert split_requests(requests) == left


@given(lengths=st.lists(st.integers(1, 50), max_size=8), threshold=st.floats(0, 0.5))
def test_a_cut_is_inside_and_as_balanced_as_asked(lengths, threshold):
    left, total = split_sequences(lengths, threshold), sum(lengths)
    assert 0 <= left <= total
    if total > 2 * len(lengths):  # long enough to be cut anywhere
        assert min(left, total - left) >= min(threshold * total, total // 2)


@given(st.data())
def test_every_token_has_its_row(data):
    size = data.draw(st.integers(1, 40))
    num_tokens = data.draw(st.integers(0, size))
    left = data.draw(st.integers(0, num_tokens))
    rows = place(num_tokens, left, size)
    assert len(set(rows.tolist())) == num_tokens
    assert (np.diff(rows) > 0).all() and ((0 <= rows) & (rows < size)).all()
    if left <= size // 2 and num_tokens - left <= size - size // 2:
        assert (rows < size // 2).sum() == left


def test_a_threshold_above_a_half_is_refused():
    with pytest.raises(ValueError, match=r"between 0 and 0\.5, got 0\.6"):
        split_sequences([3], 0.6)
