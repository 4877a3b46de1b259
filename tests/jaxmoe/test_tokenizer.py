"""Tokenizer: round trips, special tokens, chat templates in all their forms, clear errors."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

import jaxmoe
from jaxmoe.config import ModelConfig
from jaxmoe.tokenizer import ChatTemplateError, Tokenizer


ASSETS = Path(jaxmoe.__file__).parent / "assets"
HELLO = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def embedded():
    return Tokenizer.load(ASSETS)


def write_model(folder: Path, **config) -> Path:
    """The embedded tokenizer with another configuration."""
    shutil.copy(ASSETS / "tokenizer.json", folder)
    base = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


def test_embedded_model_is_consistent(embedded):
    config = ModelConfig.load(ASSETS)
    assert embedded.vocab_size <= config.vocab_size == 320
    assert embedded.bos_token_id == config.bos_token_id
    assert (embedded.eos_token_id,) == config.eos_token_ids
    assert [embedded.id_to_bytes(byte) for byte in range(256)] == [bytes([b]) for b in range(256)]


def test_embedded_tokenizer_is_what_its_script_makes(tmp_path):
    runpy.run_path(str(ASSETS / "make_tokenizer.py"))["main"](tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ASSETS / name).read_bytes()


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_decode_inverts_encode(embedded, text):
    ids = embedded.encode(text)
    assert ids[0] == embedded.bos_token_id
    assert embedded.decode(ids) == text
    assert b"".join(map(embedded.id_to_bytes, embedded.encode(text, False))) == text.encode()


def test_special_tokens_are_skipped_or_shown(embedded):
    ids = embedded.encode("a<|end|>")
    assert ids == [256, 97, 257]
    assert embedded.decode(ids) == "a"
    assert embedded.decode(ids, skip_special_tokens=False) == "<|begin|>a<|end|>"


def test_ids_without_a_token_decode_to_nothing(embedded):
    assert embedded.decode([97, 319, 98]) == "ab"
    assert embedded.id_to_bytes(319) == b""


def test_chat_template_is_encoded_without_another_bos(embedded):
    ids = embedded.apply_chat_template(HELLO)
    assert embedded.decode(ids, False) == "<|begin|><|user|>hé<|end|><|assistant|>"
    assert ids.count(embedded.bos_token_id) == 1
    assert embedded.apply_chat_template(HELLO, add_generation_prompt=False) == ids[:-1]


def test_chat_template_can_refuse(embedded):
    with pytest.raises(
        ChatTemplateError, match="role must be system, user or assistant, got judge"
    ):
        embedded.apply_chat_template([{"role": "judge", "content": ""}])
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
    backend = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    assert Tokenizer(backend).encode("a") == [97]
