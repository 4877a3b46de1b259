"""TextStream: what comes out piece by piece is what decoding everything at once gives."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from jaxmoe.tokenizer import Tokenizer
from serving.text import TextStream


EXAMPLES = settings(max_examples=150, deadline=None)
# Ends, beginnings and pieces of characters, and text that stop strings can be made of.
BYTES = [*b"ab \n", *"é€😀".encode(), 0x80, 0xC3, 0xE2, 0xF0, 0xFF]
STOP_TEXT = st.text("ab é€\ufffd", min_size=1, max_size=4)


def byte_level() -> Tokenizer:
    return Tokenizer.load(Path(__file__).parents[1] / "byte_tokenizer")


def sentencepiece() -> Tokenizer:
    """Word pieces with a leading mark, and bytes for what they lack, as Llama's."""
    pieces = ["▁", "▁▁", "▁a", "a", "b", "ab", "▁ab", "é", "€", "▁b▁", ""]
    byte_tokens = [f"<0x{byte:02X}>" for byte in BYTES]
    backend = word_level([*pieces, *byte_tokens])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def metaspace(prepend_scheme: str) -> Tokenizer:
    backend = word_level(["▁", "▁▁", "▁a", "a", "b", "ab", "a▁b", "é", "€", ""])
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return Tokenizer(backend)


def word_level(tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


TOKENIZERS = {
    "byte_level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace_always": metaspace("always"),
    "metaspace_never": metaspace("never"),
}
over_tokenizers = pytest.mark.parametrize("name", TOKENIZERS)


def draw_ids(data: st.DataObject, name: str) -> list[int]:
    tokenizer = TOKENIZERS[name]
    if name == "byte_level":
        token = st.sampled_from([*BYTES, 256, 257, 319])
    else:
        token = st.integers(0, tokenizer.vocab_size)  # the last has no token
    return data.draw(st.lists(token, max_size=40))


def stream(name: str, ids: list[int], stop: tuple[str, ...] = (), skip: bool = True):
    text = TextStream(TOKENIZERS[name], stop, skip)
    pieces = [text.push(token_id) for token_id in ids]
    return text, [*pieces, text.finish()]


def before_first_completed(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [found for found in stop if text[:end].endswith(found)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@over_tokenizers
@given(data=st.data(), skip=st.booleans())
@EXAMPLES
def test_pieces_make_the_whole(name, data, skip):
    ids = draw_ids(data, name)
    _, pieces = stream(name, ids, skip=skip)
    assert "".join(pieces) == TOKENIZERS[name].decode(ids, skip)


@over_tokenizers
@given(data=st.data(), stop=st.lists(STOP_TEXT, max_size=4))
@EXAMPLES
def test_text_ends_before_the_first_stop_string(name, data, stop):
    ids = draw_ids(data, name)
    text, pieces = stream(name, ids, tuple(stop))
    expected = before_first_completed(TOKENIZERS[name].decode(ids), tuple(stop))
    assert ("".join(pieces), text.matched) == expected


@over_tokenizers
@given(data=st.data(), stop=st.lists(STOP_TEXT, max_size=4))
@EXAMPLES
def test_nothing_is_ever_taken_back(name, data, stop):
    """What is out at any time stays right whatever comes next, so it is a prefix of both ends."""
    ids = draw_ids(data, name)
    text = TextStream(TOKENIZERS[name], tuple(stop))
    out = "".join(text.push(token_id) for token_id in ids)
    now, _ = before_first_completed(TOKENIZERS[name].decode(ids), tuple(stop))
    assert now.startswith(out)


@given(st.text(), st.text(min_size=1))
@EXAMPLES
def test_characters_come_whole_and_at_once(text, stop):
    """Valid text is never behind by more than the open character."""
    stream = TextStream(TOKENIZERS["byte_level"])
    data = text.encode()
    out = ""
    for end, byte in enumerate(data, start=1):
        out += stream.push(byte)
        assert out == data[:end].decode("utf-8", "ignore")


def test_stop_string_across_tokens():
    text = TextStream(TOKENIZERS["byte_level"], ("END", "ENOUGH"))
    pieces = [text.push(byte) for byte in b"xENENDy"]
    assert pieces == ["x", "", "", "EN", "", "", ""]
    assert text.matched == "END"
    assert text.finish() == ""


def test_held_text_is_released_at_the_end():
    text = TextStream(TOKENIZERS["byte_level"], ("END",))
    assert [text.push(byte) for byte in b"EN"] == ["", ""]
    assert text.finish() == "EN"
    assert text.finish() == ""
    assert text.matched is None


def test_open_bytes_at_the_end_can_complete_a_stop_string():
    text = TextStream(TOKENIZERS["byte_level"], ("a\ufffd",))
    assert [text.push(token_id) for token_id in (98, 97, 0xE2)] == ["b", "", ""]
    assert text.finish() == ""
    assert text.matched == "a\ufffd"


@over_tokenizers
def test_cost_of_a_token_does_not_grow(name, monkeypatch):
    decoded = 0
    decode = Tokenizer.decode

    def counting_decode(self, ids, *args, **kwargs):
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", counting_decode)
    ids = [3, 2, 1, 4] * 500
    stream(name, ids)
    assert decoded <= 10 * len(ids)
