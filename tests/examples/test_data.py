"""The tokenizer comes back to the same bytes; batches are packed, weighted and resumable."""

import json
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from examples.train_tiny import data, make_tokenizer
from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.tasks import train_document
from jaxmoe.tokenizer import Tokenizer


SHAPE = {"batch_size": 3, "sequence_length": 256}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(EMBEDDED_MODEL)


def make(num_workers: int = 0, seed: int = 0):
    return data.make_dataset(EMBEDDED_MODEL, seed=seed, num_workers=num_workers, **SHAPE)


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return [next(iterator) for _ in range(count)]


def assert_same(first, second) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.slow
def test_tokenizer_is_made_again_byte_for_byte(tmp_path: Path) -> None:
    make_tokenizer.write(make_tokenizer.make_tokenizer(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (EMBEDDED_MODEL / name).read_bytes()


def test_tokenizer_has_4096_entries_and_splits_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096
    vocabulary = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert all(len(token) == 1 for token in vocabulary if any(c.isdigit() for c in token))
    assert len(tokenizer.encode("12345", add_special_tokens=False)) == 5


@hypothesis.given(st.text())
@hypothesis.example("naïve 東京 \U0001f600\r\n\t  12 000 <|end| >")
@hypothesis.settings(max_examples=200, deadline=None)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_documents_are_what_the_chat_template_makes(tokenizer: Tokenizer) -> None:
    render = data.Renderer(str(EMBEDDED_MODEL), 0.1)
    for index in range(300):
        document = train_document(0, index)
        ids, _ = render(document)
        if document[0][0] == "text":
            expected = [*tokenizer.encode(document[0][1]), tokenizer.eos_token_id]
        else:
            messages = [{"role": role, "content": text} for role, text in document]
            expected = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert ids == expected


def test_weights_are_those_of_the_roles(tokenizer: Tokenizer) -> None:
    render = data.Renderer(str(EMBEDDED_MODEL / "tokenizer.json"), 0.25)
    ids, weights = render([("user", "What is 1 + 2?"), ("assistant", "1+2=3\n#### 3")])
    weight_of = dict.fromkeys((0.0, 0.25, 1.0), "")
    for token_id, weight in zip(ids, weights, strict=True):
        weight_of[weight] += tokenizer.decode([token_id], skip_special_tokens=False)
    assert weight_of == {
        0.0: "<|begin|><|user|><|assistant|>",
        0.25: "What is 1 + 2?<|end|>",
        1.0: "1+2=3\n#### 3<|end|>",
    }
    _, weights = render([("text", "Once.")])
    assert weights[0] == 0 and set(weights[1:]) == {1.0}


def test_rows_are_documents_end_to_end(tokenizer: Tokenizer) -> None:
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    render = data.Renderer(str(EMBEDDED_MODEL), 0.1)
    index = 2 * data.DOCUMENTS_PER_BATCH
    batch = data.BatchSource(str(EMBEDDED_MODEL), seed=0, **SHAPE)[2]
    assert batch["tokens"].shape == (3, 257) and batch["tokens"].dtype == np.int32
    assert all(batch[name].shape == (3, 256) for name in ("loss_mask", "segment_ids", "positions"))
    for row in range(3):
        tokens, mask = batch["tokens"][row], batch["loss_mask"][row]
        start = 0
        while start < 257:
            ids, weights = render(train_document(0, index))
            index += 1
            stop = min(start + len(ids), 257)
            assert tokens[start:stop].tolist() == ids[: stop - start]
            inputs = slice(start, min(stop, 256))
            assert len(set(batch["segment_ids"][row, inputs])) <= 1
            positions = batch["positions"][row, inputs]
            assert positions.tolist() == list(range(len(positions)))
            if start:  # the target that begins this document
                assert tokens[start - 1] == end and tokens[start] == begin
                assert mask[start - 1] == 0
            np.testing.assert_array_equal(
                mask[start : stop - 1], np.float32(weights[1 : stop - start])
            )
            start = stop
        segments = batch["segment_ids"][row]
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}


def test_batches_depend_on_seed_and_place_only() -> None:
    batches = take(iter(make()), 3)
    assert_same(batches, take(iter(make()), 3))
    assert not np.array_equal(batches[0]["tokens"], batches[1]["tokens"])
    other = next(iter(make(seed=1)))
    assert not np.array_equal(batches[0]["tokens"], other["tokens"])


def test_iterator_resumes() -> None:
    iterator = iter(make())
    take(iterator, 3)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 3)
    again = iter(make())
    again.set_state(state)
    assert_same(expected, take(again, 3))


def test_workers_change_nothing_and_resume() -> None:
    expected = take(iter(make()), 7)
    iterator = iter(make(num_workers=2))
    assert_same(expected[:4], take(iterator, 4))
    state = iterator.get_state()
    again = iter(make(num_workers=2))
    again.set_state(state)
    assert_same(expected[4:], take(again, 3))
