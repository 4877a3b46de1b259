import json

import pytest

from jaxmoe.offline.options import GenerationOptions, PromptRequest
from jaxmoe.offline.pipeline import LineParser, PromptFile, Rejected, batches
from jaxmoe.tokenizer import Tokenizer


OPTIONS = GenerationOptions(max_new_tokens=8, seed=100)


@pytest.fixture(scope="module")
def parse(model_dir):
    return LineParser(OPTIONS, Tokenizer.load(model_dir), vocab_size=320, max_tokens=256)


def test_a_text_is_tokenised(parse):
    request = parse((3, b'{"prompt": "hello"}\n'))
    assert request == PromptRequest(3, tuple(parse.tokenizer.encode("hello")), 8, 0.0, 103)


def test_a_conversation_goes_through_the_chat_template(parse):
    messages = [{"role": "user", "content": "hello"}]
    request = parse((0, json.dumps({"messages": messages}).encode()))
    assert request.prompt_ids == tuple(parse.tokenizer.apply_chat_template(messages))


def test_a_line_overrides_options(parse):
    line = {"prompt_ids": [5], "max_new_tokens": 3, "temperature": 1, "seed": 4, "id": "x"}
    assert parse((9, json.dumps(line).encode())) == PromptRequest(9, (5,), 3, 1.0, 4, "x")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"{", "must be a JSON object"),
        (b"[1]", "must be a JSON object, got list"),
        (b'{"prompt": "\xff"}', "must be UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogates not allowed"),
        (b'{"prompt": 1}', "prompt must be a string"),
        (b'{"prompt": "a", "prompt_ids": [1]}', "exactly one of"),
        (b'{"id": 1}', "exactly one of"),
        (b'{"prompt": "a", "max_tokens": 1}', "unknown fields ['max_tokens']"),
        (b'{"prompt": "a", "id": 1.5}', "id must be"),
        (b'{"prompt": "a", "max_new_tokens": true}', "max_new_tokens must be"),
        (b'{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens must be"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature must be"),
        (b'{"prompt": "a", "seed": 1.0}', "seed must be"),
        (b'{"prompt": "a", "max_new_tokens": 256}', "must not exceed the model's 256 positions"),
        (b'{"prompt_ids": []}', "at least one token"),
        (b'{"prompt_ids": [1, 320]}', "token ids must be integers in [0, 320), got 320"),
        (b'{"prompt_ids": [1.0]}', "token ids must be integers"),
        (b'{"prompt_ids": "1"}', "prompt_ids must be a list"),
        (b'{"messages": []}', "messages must be a list of objects"),
        (b'{"messages": [{"content": "a"}]}', "messages must be a list of objects"),
        (b"9" * 5000, "must be a JSON object"),
        (b"[" * 100000, "must be a JSON object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_line_is_rejected_with_the_rule(parse, line, rule):
    rejected = parse((4, line))
    assert isinstance(rejected, Rejected)
    assert rule in rejected.error
    assert rejected.line_number == 5


def test_without_a_tokenizer_only_ids_run():
    parse = LineParser(OPTIONS, None, vocab_size=320, max_tokens=256)
    assert "no tokenizer" in parse((0, b'{"prompt": "a"}')).error
    assert parse((0, b'{"prompt_ids": [1]}')).prompt_ids == (1,)


def test_batches_hold_similar_lengths_and_every_line_once(tmp_path, parse):
    path = tmp_path / "prompts.jsonl"
    lengths = [3, 100] * 7
    lines = [json.dumps({"prompt_ids": [1] * length}) for length in lengths]
    lines[4] = "not JSON"
    path.write_text("\n".join([*lines[:6], "", *lines[6:]]))
    source = PromptFile(path, skip={0})
    assert source.num_prompts == len(lines)
    items = list(batches(source, parse, batch_size=4))
    assert [item.index for item in items if isinstance(item, Rejected)] == [4]
    requests = [[request.index for request in item] for item in items if isinstance(item, list)]
    # Line 6 is empty. The long prompts fill one batch, the short ones one; the rest is mixed.
    assert requests == [[1, 3, 5, 8], [2, 7, 9, 11], [10, 12, 14, 13]]


def test_an_empty_file_gives_nothing(tmp_path, parse):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n")
    assert list(batches(PromptFile(path), parse, batch_size=4)) == []
