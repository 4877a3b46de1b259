"""Request bodies: what is accepted, what each rule refuses, what becomes of it."""

import json

import pytest
from pydantic import ValidationError

from serving.http.errors import ApiError, from_validation
from serving.http.protocol import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    ModelInfo,
    token_budget,
)


INFO = ModelInfo("m", "/m", 320, context_length=100, eos_token_ids=(257,), max_num_pages_tokens=500)
HI = [{"role": "user", "content": "hi"}]


def parse(kind, **fields):
    try:
        body = kind.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        raise from_validation(error) from None
    body.refuse_unsupported()
    return body


def completion(**fields):
    return parse(CompletionBody, **{"prompt": "hi", **fields})


def chat(**fields):
    return parse(ChatBody, **{"messages": HI, **fields})


def generate(**fields):
    return parse(GenerateBody, **({"text": "hi"} | fields))


def test_defaults():
    params = completion().params(INFO, 3)
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (16, 1, 1, 0)
    assert not params.logprobs and not params.edits_logits and params.stop == ()
    assert chat().params(INFO, 3).max_new_tokens == 97
    body = generate()
    assert body.params(body.sampling_params[0], INFO, 3).max_new_tokens == 97


def test_null_means_default():
    names = set(CompletionBody.model_fields) - {"prompt"}
    assert completion(**dict.fromkeys(names)).params(INFO, 3) == completion().params(INFO, 3)
    names = set(ChatBody.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)).params(INFO, 3) == chat().params(INFO, 3)
    assert generate(sampling_params=None, input_ids=None, rid=None).prompts == "hi"


def test_every_parameter_arrives():
    body = completion(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=5, stop="x", stop_token_ids=[3],
        ignore_eos=True, frequency_penalty=-2, presence_penalty=2, logit_bias={"4": -100},
        logprobs=3, echo=True,
    )  # fmt: skip
    params = body.params(INFO, 3)
    assert params.temperature == 0.5 and params.top_p == 0.9 and params.min_p == 0.1
    assert params.top_k == 7 and params.max_new_tokens == 5 and params.stop == ("x",)
    assert params.stop_token_ids == {3} and params.ignore_eos
    assert (params.frequency_penalty, params.presence_penalty) == (-2, 2)
    assert params.logit_bias == {4: -100}
    assert params.logprobs and params.num_top_logprobs == 3 and params.prompt_logprobs


@pytest.mark.parametrize(
    ("given", "wanted", "start"), [(None, False, 0), (-1, False, 0), (0, True, 0), (7, True, 7)]
)
def test_prompt_logprobs_start_where_they_are_asked_for(given, wanted, start):
    body = generate(return_logprob=True, logprob_start_len=given)
    params = body.params(body.sampling_of(1)[0], INFO, 3)
    assert (params.prompt_logprobs, params.prompt_logprobs_start) == (wanted, start)


@pytest.mark.parametrize(
    ("given", "expected"), [(-1, 0), (0, 0), (5, 5), (320, 320), (10**15, 320)]
)
def test_top_k(given, expected):
    assert completion(top_k=given).params(INFO, 3).top_k == expected


def test_tiny_temperature_is_greedy():
    assert completion(temperature=1e-30).params(INFO, 3).temperature == 0
    assert completion(temperature=0.01).params(INFO, 3).temperature == 0.01


@pytest.mark.parametrize(
    "prompt", ["a", ["a", "b"], [1, 2], [[1, 2], [3]]], ids=["text", "texts", "ids", "lists of ids"]
)
def test_forms_of_prompt(prompt):
    assert completion(prompt=prompt).prompt == prompt


BAD_SAMPLING = [
    ("temperature", "hot"), ("temperature", float("nan")), ("temperature", float("inf")),
    ("temperature", True), ("temperature", -0.1), ("temperature", 2.1),
    ("top_p", -0.1), ("top_p", 1.1), ("top_p", "1"), ("top_k", -2), ("top_k", 1.5), ("top_k", True),
    ("min_p", -0.1), ("min_p", 1.1), ("seed", "1"), ("seed", 2**64), ("seed", 1.5),
    ("n", 0), ("n", 129), ("n", True), ("n", 1.0),
    ("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop", [3]), ("stop", ["a"] * 17),
    ("stop_token_ids", 3), ("stop_token_ids", ["3"]), ("stop_token_ids", [320]),
    ("stop_token_ids", [-1]), ("ignore_eos", 1), ("ignore_eos", "true"),
    ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("presence_penalty", "2"),
    ("presence_penalty", float("nan")),
    ("logit_bias", {"1": 101}), ("logit_bias", {"1": "5"}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"320": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", [1]),
    ("logit_bias", {"²": 1}),
    ("min_tokens", 3), ("repetition_penalty", 1.1), ("skip_special_tokens", False),
    ("guided_regex", "a*"), ("temprature", 1),
]  # fmt: skip
BAD_OPENAI = [
    ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
    ("max_tokens", 0), ("max_tokens", 98), ("stream", 1), ("stream", "yes"), ("model", 3),
    ("stream_options", {"include_usage": True}), ("rid", ""), ("rid", 3), ("rid", ["a", "a"]),
    ("rid", []),
]  # fmt: skip


@pytest.mark.parametrize(("param", "value"), BAD_SAMPLING + BAD_OPENAI)
@pytest.mark.parametrize("kind", [completion, chat])
def test_bad_values_are_named(kind, param, value):
    with pytest.raises(ApiError) as caught:
        kind(**{param: value}).params(INFO, 3)
    assert caught.value.status == 400
    assert caught.value.param.split(".")[0] == param
    assert param in caught.value.message
    assert caught.value.kind == "invalid_request_error"


@pytest.mark.parametrize(("param", "value"), BAD_SAMPLING)
def test_bad_values_are_named_in_native_sampling_params(param, value):
    with pytest.raises(ApiError, match=param) as caught:
        body = generate(sampling_params={param: value})
        body.params(body.sampling_params[0], INFO, 3)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("prompt", ""), ("prompt", []), ("prompt", ["a", ""]), ("prompt", [[1], []]),
        ("prompt", None), ("prompt", 3), ("prompt", ["a", 3]), ("prompt", [True]),
        ("prompt", [1.0]), ("prompt", {"a": 1}),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("echo", 1),
        ("best_of", 2), ("suffix", "x"),
    ],
)  # fmt: skip
def test_bad_completions(param, value):
    with pytest.raises(ApiError) as caught:
        completion(**{param: value})
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ({"messages": [*HI, {**HI[0], "tool_calls": [{}]}]}, "messages.1.tool_calls"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": 2}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"stream": True, "stream_options": {"chunk": 3}}, "stream_options.chunk"),
    ],
)
def test_bad_chats(fields, param):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": None},
        {"input_ids": [1]},
        {"text": [1, 2]},
        {"text": None, "input_ids": "hi"},
        {"text": ["a", "b", "c"], "sampling_params": [{}, {}]},
        {"image_data": ["x"]},
        {"sampling_params": [{"max_new_tokens": -1}]},
        {"logprob_start_len": -2},
        {"top_logprobs_num": 21},
    ],
)
def test_bad_generates(fields):
    with pytest.raises(ApiError):
        generate(**fields).sampling_of(3)


def test_fields_that_change_nothing_are_ignored():
    completion(user="me", metadata={"a": "b"}, suffix="", best_of=1, repetition_penalty=1.0)
    completion(n=2, best_of=2, unheard_of=None)
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=True)
    chat(messages=[{**HI[0], "name": "x", "refusal": None, "tool_calls": None}])
    chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    generate(sampling_params={"min_new_tokens": 0}, lora_path=None, image_data=[])


def test_messages_for_the_template():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    )
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
    ]


def test_token_budget():
    def budget(prompt, requested=None, default=16, info=INFO):
        return token_budget(info, prompt, requested, "prompt", default=default)

    assert budget(10) == 16
    assert budget(90) == 10  # a default never asks for too much
    assert budget(90, default=None) == 10
    assert budget(90, 10) == 10
    assert budget(100, 0) == 0
    for prompt, requested, param in [(90, 11, "max_tokens"), (100, None, "prompt"),
                                     (101, 0, "prompt"), (100, 1, "prompt")]:  # fmt: skip
        with pytest.raises(ApiError, match="maximum context length is 100") as caught:
            budget(prompt, requested)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
    small = ModelInfo("m", "/m", 320, 100, (), max_num_pages_tokens=20)
    with pytest.raises(ApiError, match="maximum context length is 20"):
        budget(10, 11, info=small)


def test_messages_state_rule_and_value():
    with pytest.raises(ApiError, match=r"top_p: .*less than or equal to 1, got 1\.5"):
        completion(top_p=1.5)
    with pytest.raises(ApiError, match=r"stop_token_ids: token ids must be in \[0, 320\), got 999"):
        completion(stop_token_ids=[999]).params(INFO, 3)
    with pytest.raises(ApiError) as caught:
        completion(temperature="x" * 10_000)
    assert len(caught.value.message) < 300
