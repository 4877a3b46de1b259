"""Tokenizer: round trips, special tokens, chat templates in all their forms, clear errors."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.config import ModelConfig
from jaxmoe.tokenizer import ChatTemplateError, Tokenizer


BYTES = Path(__file__).parents[1] / "byte_tokenizer"
HELLO = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def by_bytes():
    return Tokenizer.load(BYTES)


def write_model(folder: Path, **config) -> Path:
    """The byte tokenizer with another configuration."""
    shutil.copy(BYTES / "tokenizer.json", folder)
    base = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


def test_embedded_model_is_consistent():
    config, tokenizer = ModelConfig.load(EMBEDDED_MODEL), Tokenizer.load(EMBEDDED_MODEL)
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.bos_token_id == config.bos_token_id
    assert (tokenizer.eos_token_id,) == config.eos_token_ids


def test_each_byte_is_a_token(by_bytes):
    assert [by_bytes.id_to_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_decode_inverts_encode(by_bytes, text):
    ids = by_bytes.encode(text)
    assert ids[0] == by_bytes.bos_token_id
    assert by_bytes.decode(ids) == text
    assert b"".join(map(by_bytes.id_to_bytes, by_bytes.encode(text, False))) == text.encode()


def test_special_tokens_are_skipped_or_shown(by_bytes):
    ids = by_bytes.encode("a<|end|>")
    assert ids == [256, 97, 257]
    assert by_bytes.decode(ids) == "a"
    assert by_bytes.decode(ids, skip_special_tokens=False) == "<|begin|>a<|end|>"


def test_ids_without_a_token_decode_to_nothing(by_bytes):
    assert by_bytes.decode([97, 319, 98]) == "ab"
    assert by_bytes.id_to_bytes(319) == b""


def test_chat_template_is_encoded_without_another_bos(by_bytes):
    ids = by_bytes.apply_chat_template(HELLO)
    assert by_bytes.decode(ids, False) == "<|begin|><|user|>hé<|end|><|assistant|>"
    assert ids.count(by_bytes.bos_token_id) == 1
    assert by_bytes.apply_chat_template(HELLO, add_generation_prompt=False) == ids[:-1]


def test_chat_template_can_refuse(by_bytes):
    with pytest.raises(
        ChatTemplateError, match="role must be system, user or assistant, got judge"
    ):
        by_bytes.apply_chat_template([{"role": "judge", "content": ""}])
    assert issubclass(ChatTemplateError, ValueError)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        [
            {"name": "tool_use", "template": "x"},
            {"name": "default", "template": "{{ messages[0].content }}"},
        ],
    ],
    ids=["string", "named"],
)
def test_forms_of_chat_template(tmp_path, template):
    tokenizer = Tokenizer.load(write_model(tmp_path, chat_template=template))
    assert tokenizer.render_chat(HELLO) == "hé"


def test_chat_template_file_wins(tmp_path):
    write_model(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).render_chat(HELLO) == "file"


def test_chat_template_has_what_transformers_gives_it(tmp_path):
    template = """{%- for m in messages %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
{{ m | tojson }} {{ extra }}{{ eos_token }}
{%- endfor %}
{{ strftime_now("%Y") | length }}"""
    tokenizer = Tokenizer.load(write_model(tmp_path, chat_template=template))
    text = tokenizer.render_chat(HELLO * 2, variables={"extra": "<b>", "eos_token": "spoofed"})
    assert text == '{"role": "user", "content": "hé"} <b><|end|>4'


def test_chat_template_runs_in_a_sandbox(tmp_path):
    template = "{{ messages.__class__.__mro__ }}"
    tokenizer = Tokenizer.load(write_model(tmp_path, chat_template=template))
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat(HELLO)


def test_missing_chat_template(tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [256, 97]),  # tokenizer.json's own post-processor
        ({"add_bos_token": True, "add_eos_token": True}, [256, 97, 257]),
        ({"add_bos_token": True, "bos_token": {"content": "<|user|>"}}, [259, 97]),
        ({"add_bos_token": False}, [97]),
    ],
)
def test_added_tokens(tmp_path, config, ids):
    tokenizer = Tokenizer.load(write_model(tmp_path, **config))
    assert tokenizer.encode("a") == ids
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_errors_name_the_file_and_the_fault(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, eos_token="</s>")
    with pytest.raises(ValueError, match="eos_token '</s>' is not in the vocabulary"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, chat_template="{% if %}")
    with pytest.raises(ValueError, match="chat template is not valid"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, chat_template=[{"name": "rag", "template": ""}])
    with pytest.raises(ValueError, match=r"named 'default', got the names \['rag'\]"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_decoders_that_cannot_be_streamed_are_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match="decoder 'CTC' is not supported"):
        Tokenizer(backend)


def test_plain_text_post_processor_is_kept_when_config_is_silent():
    backend = tokenizers.Tokenizer.from_file(str(BYTES / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    assert Tokenizer(backend).encode("a") == [97]
