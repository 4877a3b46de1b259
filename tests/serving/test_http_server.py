"""The endpoints over a real uvicorn server, in front of a loop that plays scripted tokens."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Gauge

from jaxmoe.tokenizer import Tokenizer
from serving.http.app import make_app
from serving.http.protocol import ModelInfo
from serving.lockstep import Record
from serving.loop import QueueFullError
from serving.request import Output, Request, TokenLogprob
from serving.text import TextStream


TOKENIZER = Tokenizer.load(Path(__file__).parents[1] / "byte_tokenizer")
EOS = 257
INFO = ModelInfo("tiny/moe", "/models/tiny", 320, 200, (EOS,), max_num_pages_tokens=10_000)
ANSWER = "Wörld 😀 €5"
ANSWER_IDS = TOKENIZER.encode(ANSWER, add_special_tokens=False)


def answer_script(request: Request) -> Iterator[int]:
    yield from ANSWER_IDS
    yield EOS


def endless_script(request: Request) -> Iterator[int]:
    return itertools.repeat(ord("x"))


def scored(token_id: int, num_top: int) -> TokenLogprob:
    """A token with made-up log-probabilities, itself the second likeliest."""
    top = [((token_id + 1) % 256, -0.25), (token_id, -0.5), ((token_id + 2) % 256, float("-inf"))]
    return TokenLogprob(token_id, -0.5, tuple(top[:num_top]))


class Playing:
    """One request of the fake loop."""

    def __init__(
        self,
        request: Request,
        script: Callable[[Request], Iterator[int]],
        num_cached: Callable[[Request], int],
    ):
        self.request = request
        self.num_cached = num_cached(request)
        self.tokens = script(request)
        self.text = TextStream(TOKENIZER, request.params.stop)
        self.is_aborted = False

    def step(self) -> Output:
        params, first = self.request.params, self.prompt_logprobs()
        if self.is_aborted:
            return Output(text=self.text.finish(), finish_reason="abort")
        if params.max_new_tokens == 0:
            return Output(
                prompt_logprobs=first, finish_reason="length", cached_tokens=self.num_cached
            )
        token = next(self.tokens)
        if token < 0:
            return Output(finish_reason="error", error="the step failed")
        self.request.output_ids.append(token)
        reason, matched, piece = None, None, ""
        ends = token == EOS and not params.ignore_eos
        if ends or token in params.stop_token_ids:
            reason, matched = "stop", token
        else:
            piece = self.text.push(token)
            if self.text.matched is not None:
                reason, matched = "stop", self.text.matched
            elif len(self.request.output_ids) >= params.max_new_tokens:
                reason = "length"
        if reason is not None:
            piece += self.text.finish()
        logprobs = (scored(token, params.num_top_logprobs),) if params.logprobs else ()
        cached = self.num_cached if len(self.request.output_ids) == 1 else 0
        return Output(piece, (token,), logprobs, first, reason, matched, cached_tokens=cached)

    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        params, ids = self.request.params, self.request.prompt_ids
        if self.request.output_ids or not params.prompt_logprobs:
            return ()
        rest = (scored(token_id, params.num_top_logprobs) for token_id in ids[1:])
        return (TokenLogprob(ids[0], None), *rest)[params.prompt_logprobs_start :]


class FakeLoop:
    """`serving.loop.ServingLoop` as HTTP sees it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.playing: dict[str, Playing] = {}
        self.stop = False
        self.reset()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def reset(self) -> None:
        self.abort_all()
        self.wait_until_idle()
        self.script = answer_script
        self.num_cached: Callable[[Request], int] = lambda request: 0
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.max_queued = 300
        self.error: str | None = None
        self.refusal: str | None = None
        self.num_flushes = 0
        self.records: list[Record] = []
        self.record_error: Exception | None = None
        self.is_paused = False
        self.is_accepting = True
        self.seconds_per_token = 0.001

    def submit(self, requests: list[Request]) -> None:
        with self.lock:
            if self.refusal or self.error:
                raise RuntimeError(self.refusal or self.error)
            if len(self.playing) + len(requests) > self.max_queued:
                raise QueueFullError("the queue is full")
            for request in requests:
                if request.rid in self.playing:
                    raise ValueError(f"rid {request.rid!r} is in use")
            self.submitted += requests
            self.playing |= {r.rid: Playing(r, self.script, self.num_cached) for r in requests}

    def abort(self, rid: str) -> bool:
        with self.lock:
            if rid not in self.playing:
                return False
            self.aborted.append(rid)
            self.playing[rid].is_aborted = True
            return True

    def abort_all(self) -> int:
        return sum(self.abort(rid) for rid in list(self.playing))

    def flush_cache(self) -> None:
        if self.playing:
            raise RuntimeError("1 request is running")
        self.num_flushes += 1

    def record(self, what: Record) -> list[str]:
        if self.record_error is not None:
            raise self.record_error
        self.records.append(what)
        return ["a.npz"] if what is Record.DUMP else []

    num_waiting = 0

    @property
    def num_running(self) -> int:
        return len(self.playing)

    def wait_until_idle(self, seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while self.playing:
            assert time.monotonic() < deadline, f"still running: {list(self.playing)}"
            time.sleep(0.005)

    def _run(self) -> None:
        while not self.stop:
            for rid, playing in list(self.playing.items()):
                if self.is_paused and not playing.is_aborted:
                    continue
                output = playing.step()
                if output.finish_reason is not None:
                    with self.lock:
                        del self.playing[rid]
                playing.request.sink(output)
            time.sleep(self.seconds_per_token)


@pytest.fixture(scope="module")
def running():
    """(loop, base URL) of one server for all tests."""
    loop = FakeLoop()
    registry = CollectorRegistry()
    Gauge("jaxmoe_of_the_loop", "Something the loop shows", registry=registry).set(7)
    app = make_app(loop, TOKENIZER, INFO, registry, health_timeout=0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield loop, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        loop.stop = True
        loop.thread.join()


@pytest.fixture
def loop(running):
    loop, _ = running
    loop.reset()
    yield loop
    loop.is_paused = False
    loop.wait_until_idle()


@pytest.fixture
def client(running, loop):
    with httpx.Client(base_url=running[1], timeout=10) as client:
        yield client


@pytest.fixture
def sdk(running, loop):
    with openai.OpenAI(base_url=running[1] + "/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def post(client, path: str, status: int = 200, **body):
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def stream(client, path: str, **body) -> list[dict]:
    """The events of a streamed answer, without the closing [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def complete(client, **body):
    return post(client, "/v1/completions", **{"prompt": "hi", "max_tokens": 100, **body})


def chat(client, **body):
    messages = [{"role": "user", "content": "hi"}]
    return post(client, "/v1/chat/completions", **{"messages": messages, **body})


def generate(client, status: int = 200, **body):
    return post(client, "/generate", status, **body)


# Completions


def test_completion(client, loop):
    answer = complete(client)
    assert answer["object"] == "text_completion" and answer["model"] == "tiny/moe"
    assert answer["id"].startswith("cmpl-") and abs(answer["created"] - time.time()) < 60
    [choice] = answer["choices"]
    assert choice == {
        "index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "matched_stop": EOS
    }  # fmt: skip
    num = len(ANSWER_IDS) + 1
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": num, "total_tokens": 3 + num,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert loop.submitted[0].prompt_ids == [256, *b"hi"]


def test_usage_says_what_was_cached(client, loop):
    """Of each prompt once: what none of its choices had to compute."""
    found = {"a-0": 2, "a-1": 1, "b-0": 3, "b-1": 3}
    loop.num_cached = lambda request: found[request.rid]
    body = {"prompt": ["a", "bc"], "n": 2, "rid": ["a", "b"]}
    expected = {"cached_tokens": 1 + 3}
    assert complete(client, **body)["usage"]["prompt_tokens_details"] == expected
    usage = {"stream_options": {"include_usage": True}}
    *_, last = stream(client, "/v1/completions", max_tokens=100, **body, **usage)
    assert last["usage"]["prompt_tokens_details"] == expected
    answers = generate(client, text=["a", "b"], sampling_params={"n": 2}, rid=["a", "b"])
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [2, 1, 3, 3]
    loop.num_cached = lambda request: 2
    scored = complete(client, max_tokens=0, echo=True)["usage"]
    assert scored["prompt_tokens_details"] == {"cached_tokens": 2}


def test_completion_ends(client):
    assert complete(client, max_tokens=3)["choices"][0]["finish_reason"] == "length"
    [choice] = complete(client, stop=["d 😀", "zzz"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Wörl", "stop")
    assert choice["matched_stop"] == "d 😀"
    [choice] = complete(client, stop_token_ids=[ord("l")])["choices"]
    assert (choice["text"], choice["matched_stop"]) == ("Wör", ord("l"))


def test_text_cut_inside_a_character(client):
    [choice] = complete(client, max_tokens=2)["choices"]
    assert choice["text"] == "W\ufffd"


def test_prompts_and_choices_are_numbered_in_order(client, loop):
    loop.script = lambda request: iter([request.prompt_ids[-1], EOS])
    answer = complete(client, prompt=["a", "bc"], n=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a"), (1, "a"), (2, "c"), (3, "c")
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 2 + 3  # each prompt once
    answer = complete(client, prompt=[[7, 65], [66]])
    assert [c["text"] for c in answer["choices"]] == ["A", "B"]
    assert [r.prompt_ids for r in loop.submitted[-2:]] == [[7, 65], [66]]


def test_seeds(client, loop):
    complete(client, seed=2**64 - 1, n=2, prompt=["a", "b"])
    assert [r.params.seed for r in loop.submitted] == [2**64 - 1, 0] * 2
    complete(client, seed=-1)
    assert loop.submitted[-1].params.seed == 2**64 - 1
    complete(client, n=3)
    seeds = {r.params.seed for r in loop.submitted[-3:]}
    assert len(seeds) == 3 and all(0 <= seed < 2**64 for seed in seeds)


def test_logprobs(client):
    [choice] = complete(client, logprobs=1)["choices"]
    logprobs = choice["logprobs"]
    num = len(ANSWER_IDS) + 1
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), num
    )
    assert logprobs["tokens"][:4] == ["W", "bytes:\\xc3", "bytes:\\xb6", "r"]
    assert logprobs["tokens"][-1] == "<|end|>"
    assert logprobs["token_logprobs"] == [-0.5] * num
    assert logprobs["top_logprobs"][0] == {"X": -0.25, "W": -0.5}
    assert logprobs["text_offset"][:5] == [0, 1, 1, 2, 3]
    assert logprobs["text_offset"][-1] == len(ANSWER)
    [choice] = complete(client, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"][0] == {"W": -0.5}
    [choice] = complete(client, logprobs=3)["choices"]
    assert choice["logprobs"]["top_logprobs"][0]["Y"] == -9999.0  # JSON has no infinity


def test_echo(client, loop):
    assert complete(client, echo=True)["choices"][0]["text"] == "hi" + ANSWER
    answer = complete(client, prompt=[104, 105], echo=True, max_tokens=0, logprobs=2)
    assert answer["usage"]["completion_tokens"] == 0
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "i"]
    assert logprobs["token_logprobs"] == [None, -0.5]
    assert logprobs["top_logprobs"] == [None, {"j": -0.25, "i": -0.5}]
    assert logprobs["text_offset"] == [0, 1]
    [choice] = complete(client, echo=True, logprobs=1)["choices"]
    assert choice["logprobs"]["tokens"][:4] == ["<|begin|>", "h", "i", "W"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 1, 2, 3]
    assert loop.submitted[-1].params.prompt_logprobs


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 1}, {"stop": "😀"}])
def test_streamed_completion_is_the_whole_one(client, options):
    whole = complete(client, n=2, prompt=["hé", "x"], **options)
    body = {"prompt": ["hé", "x"], "n": 2, "max_tokens": 100, **options}
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = stream(client, "/v1/completions", **body, **usage)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    for expected in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"]]
        pieces = [piece for piece in pieces if piece["index"] == expected["index"]]
        assert "".join(piece["text"] for piece in pieces) == expected["text"]
        assert [p["finish_reason"] for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]
        if expected["logprobs"]:
            for name, values in expected["logprobs"].items():
                assert [x for piece in pieces for x in piece["logprobs"][name]] == values


def test_streamed_text_never_breaks_a_character(client):
    chunks = stream(client, "/v1/completions", prompt="hi", max_tokens=100)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "😀" in texts and not any("\ufffd" in text for text in texts)
    assert "usage" not in chunks[0]


# Chat


def test_chat(client, loop):
    answer = chat(client, logprobs=True, top_logprobs=2)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert content[1]["token"] == "\ufffd" and content[1]["bytes"] == [0xC3]
    assert bytes(b for entry in content[:-1] for b in entry["bytes"]).decode() == ANSWER
    assert content[0]["top_logprobs"] == [
        {"token": "X", "logprob": -0.25, "bytes": [88]},
        {"token": "W", "logprob": -0.5, "bytes": [87]},
    ]
    prompt = TOKENIZER.decode(loop.submitted[0].prompt_ids, skip_special_tokens=False)
    assert prompt == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert loop.submitted[0].params.max_new_tokens == 200 - len(loop.submitted[0].prompt_ids)


def test_streamed_chat(client):
    *chunks, usage = stream(
        client,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        n=2,
        stream_options={"include_usage": True},
    )
    assert usage["usage"]["completion_tokens"] == 2 * (len(ANSWER_IDS) + 1)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(c["delta"].get("content", "") for c in choices) == ANSWER
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")


def test_template_refuses(client):
    messages = [{"role": "judge", "content": "hi"}]
    answer = post(client, "/v1/chat/completions", 400, messages=messages)
    assert "role must be system" in answer["error"]["message"]
    for kwargs in ({"messages": 1, "self": 2}, {"bos_token": "x"}):  # cannot replace anything
        assert chat(client, chat_template_kwargs=kwargs)["choices"]


# Generate


def test_generate(client, loop):
    answer = generate(client, text="hi", sampling_params={"temperature": 0}, rid="me")
    assert answer["text"] == ANSWER and answer["output_ids"] == [*ANSWER_IDS, EOS]
    meta = answer["meta_info"]
    assert meta["id"] == "me" and meta["finish_reason"] == {"type": "stop", "matched": EOS}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(ANSWER_IDS) + 1)
    answer = generate(client, input_ids=[65], sampling_params={"max_new_tokens": 2})
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert loop.submitted[-1].prompt_ids == [65]
    assert isinstance(generate(client, text=["hi"]), list)


def test_generate_batch(client, loop):
    loop.script = lambda request: iter([request.prompt_ids[-1], EOS])
    answers = generate(
        client,
        text=["a", "b"],
        rid=["x", "y"],
        sampling_params=[{"max_new_tokens": 1, "sampling_seed": 4}, {"n": 2, "seed": 5}],
    )
    assert [a["text"] for a in answers] == ["a", "b", "b"]
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y-0", "y-1"]
    assert [r.params.seed for r in loop.submitted] == [4, 5, 6]
    generate(client, 400, text=["a", "b"], rid=["x"])


def test_generate_logprobs(client):
    options = {"return_logprob": True, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = generate(client, text="hi", logprob_start_len=0, **options)["meta_info"]
    assert meta["input_token_logprobs"][:2] == [[None, 256, "<|begin|>"], [-0.5, 104, "h"]]
    assert meta["output_token_logprobs"][0] == [-0.5, 87, "W"]
    assert meta["input_top_logprobs"][:2] == [None, [[-0.25, 105, "i"]]]
    assert meta["output_top_logprobs"][0] == [[-0.25, 88, "X"]]
    meta = generate(client, text="hi", logprob_start_len=2, **options)["meta_info"]
    assert meta["input_token_logprobs"] == [[-0.5, 105, "i"]]
    meta = generate(client, text="hi", return_logprob=True)["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs"][0][2] is None


def test_streamed_generate_repeats_what_was(client):
    events = stream(client, "/generate", text="hi")
    assert events[-1]["text"] == ANSWER
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(events))
    assert events[0]["meta_info"]["finish_reason"] is None
    events = stream(client, "/generate", text=["a", "b"])
    assert {event["index"] for event in events} == {0, 1}


# Errors


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}'])
def test_malformed_json(client, path, data):
    response = client.post(path, content=data)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_errors_have_openai_form(client):
    error = post(client, "/v1/completions", 400, prompt="hi", top_p=3)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == "top_p" and "got 3" in error["message"]
    error = post(client, "/v1/completions", 400, prompt=[1, 320])["error"]
    assert error["param"] == "prompt" and "[0, 320), got 320" in error["message"]
    error = post(client, "/v1/completions", 400, prompt="x" * 300)["error"]
    assert error["code"] == "context_length_exceeded"
    assert client.get("/nowhere").json()["error"]["code"] == "not_found"
    assert client.get("/v1/completions").status_code == 405


def test_model_names(client):
    for name in (None, "default", "tiny/moe"):
        assert complete(client, model=name)["model"] == "tiny/moe"
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        body.pop("messages" if path == "/v1/completions" else "prompt")
        error = post(client, path, 404, model="other", **body)["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny/moe"]
    assert client.get("/v1/models/tiny/moe").json()["max_model_len"] == 200
    assert client.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("is_streamed", [False, True])
def test_server_cannot(client, loop, is_streamed):
    loop.max_queued = 1
    response = client.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": is_streamed})
    assert response.status_code == 503 and int(response.headers["Retry-After"]) >= 1
    loop.refusal = "shutting down"
    response = client.post("/v1/completions", json={"prompt": "a", "stream": is_streamed})
    assert response.status_code == 503 and "shutting down" in response.json()["error"]["message"]


def test_failed_step(client, loop):
    loop.script = lambda request: iter([65, -1])
    for path, prompt in [("/v1/completions", {"prompt": "hi"}), ("/generate", {"text": "hi"})]:
        error = post(client, path, 500, **prompt)["error"]
        assert error["message"] == "the step failed"
        assert stream(client, path, **prompt)[-1]["error"] == error


def test_one_failed_choice_ends_the_others(client, loop):
    scripts = iter([endless_script, lambda request: iter([65, -1])])
    loop.script = lambda request: next(scripts)(request)
    post(client, "/v1/completions", 500, prompt="hi", n=2, max_tokens=100)
    loop.wait_until_idle()
    assert len(loop.aborted) == 1


def test_bug_is_not_shown(running, client, loop, monkeypatch):
    def broken(requests):
        raise KeyError("secret")

    monkeypatch.setattr(loop, "submit", broken)
    error = post(client, "/v1/completions", 500, prompt="hi")["error"]
    assert error["type"] == "internal_server_error" and "secret" not in error["message"]


def test_body_size_is_limited(client, monkeypatch):
    monkeypatch.setattr("serving.http.base.MAX_BODY_BYTES", 100)
    post(client, "/v1/completions", 413, prompt="x" * 100)


def test_client_gone_while_sending(running, loop, client):
    host, port = running[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    counted = 'jaxmoe_http_requests_total{endpoint="/generate",status="499"} 1.0'
    wait_for(lambda: counted in client.get("/metrics").text)
    assert not loop.submitted


def test_documentation_is_served(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/generate", "/health"} <= paths.keys()


# Ending requests from outside


@contextmanager
def in_background(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    try:
        yield answers
    finally:
        thread.join()


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_abort_by_rid(client, loop):
    loop.is_paused = True
    with in_background(lambda: complete(client, rid="mine", n=2)) as answers:
        wait_for(lambda: len(loop.playing) == 2)
        assert post(client, "/abort_request", rid="other") == {"num_aborted": 0}
        assert post(client, "/abort_request", rid="mine-1") == {"num_aborted": 1}
        wait_for(lambda: len(loop.playing) == 1)
        assert post(client, "/abort_request", rid="mine") == {"num_aborted": 1}
    assert answers[0]["id"] == "mine"
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort", "abort"]


def test_abort_all(client, loop):
    loop.script = endless_script
    loop.is_paused = True
    with in_background(lambda: generate(client, text=["a", "b"])) as answers:
        wait_for(lambda: len(loop.playing) == 2)
        assert post(client, "/abort_request", abort_all=True) == {"num_aborted": 2}
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers[0]] == ["abort"] * 2
    post(client, "/abort_request", 400)


def test_rid_in_use(client, loop):
    loop.is_paused = True
    with in_background(lambda: complete(client, rid="mine")):
        wait_for(lambda: loop.playing)
        error = post(client, "/v1/completions", 400, prompt="hi", rid="mine")["error"]
        assert error["param"] == "rid" and "in use" in error["message"]
        loop.is_paused = False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("is_paused", [False, True], ids=["between tokens", "before the first"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_disconnect_ends_the_requests(running, loop, path, is_paused, is_streamed):
    loop.script, loop.is_paused = endless_script, is_paused
    loop.seconds_per_token = 0.05  # far from its end when the client goes
    body = {
        "/v1/completions": {"prompt": "hi", "n": 3, "max_tokens": 190},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "n": 3},
        "/generate": {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 190}},
    }[path]
    data = json.dumps({**body, "stream": is_streamed}).encode()
    host, port = running[1].removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        wait_for(lambda: len(loop.submitted) == 3)
    wait_for(lambda: sorted(loop.aborted) == sorted(request.rid for request in loop.submitted))
    loop.wait_until_idle()


# The rest


def test_health(client, loop):
    assert client.get("/health").status_code == 200
    assert client.get("/health_generate").status_code == 200
    assert loop.submitted[-1].params.max_new_tokens == 1
    loop.is_paused = True
    assert client.get("/health").status_code == 200
    response = client.get("/health_generate")
    assert response.status_code == 503 and "no token within 0.3 s" in response.text
    loop.wait_until_idle()
    loop.error = "a step failed"
    for path in ("/health", "/health_generate"):
        response = client.get(path)
        assert response.status_code == 503 and "a step failed" in response.text


def test_model_info(client):
    info = client.get("/get_model_info").json()
    assert info["model_path"] == "/models/tiny" and info["is_generation"] is True
    assert info["context_length"] == 200 and info["eos_token_ids"] == [EOS]


def test_flush_cache(client, loop):
    assert client.get("/flush_cache").status_code == 200
    assert client.post("/flush_cache").status_code == 200
    assert loop.num_flushes == 2
    loop.is_paused = True
    with in_background(lambda: complete(client)):
        wait_for(lambda: loop.playing)
        response = client.post("/flush_cache")
        assert response.status_code == 400 and "running" in response.json()["error"]["message"]
        loop.is_paused = False


def test_expert_distribution_record(client, loop):
    for action, answer in (
        ("start", {"status": "recording"}),
        ("stop", {"status": "stopped"}),
        ("dump", {"files": ["a.npz"]}),
    ):
        response = client.post(f"/{action}_expert_distribution_record")
        assert (response.status_code, response.json()) == (200, answer)
    assert loop.records == [Record.START, Record.STOP, Record.DUMP]
    for error, status in ((RuntimeError("not now"), 400), (OSError("no space"), 500)):
        loop.record_error = error
        response = client.post("/dump_expert_distribution_record")
        assert response.status_code == status
        assert str(error) in response.json()["error"]["message"]


def test_metrics(client):
    complete(client)
    post(client, "/v1/completions", 400, prompt="")
    client.get("/v1/models/tiny/moe")
    client.get("/nowhere")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    assert "jaxmoe_of_the_loop 7.0" in lines
    counts = dict(line.rsplit(" ", 1) for line in lines if line.startswith("jaxmoe_http"))

    def count(endpoint: str, status: int) -> float:
        name = f'jaxmoe_http_requests_total{{endpoint="{endpoint}",status="{status}"}}'
        return float(counts.get(name, 0))

    assert count("/v1/completions", 200) >= 1 and count("/v1/completions", 400) >= 1
    assert count("/v1/models/{name:path}", 200) >= 1 and count("unknown", 404) >= 1
    assert "nowhere" not in response.text


# The openai client, unmodified


def test_openai_client_whole(sdk):
    assert [model.id for model in sdk.models.list()] == ["tiny/moe"]
    assert sdk.models.retrieve("tiny/moe").owned_by == "jaxmoe"
    completion = sdk.completions.create(model="default", prompt="hi", max_tokens=99, logprobs=2)
    assert completion.choices[0].text == ANSWER
    assert completion.choices[0].logprobs.token_logprobs[0] == -0.5
    chat = sdk.chat.completions.create(
        model="tiny/moe",
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=1,
        stop=["5"],
        extra_body={"top_k": 5, "ignore_eos": True},
    )
    assert chat.choices[0].message.content == ANSWER[:-1]
    assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "X"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens


def test_openai_client_streams(sdk):
    chunks = list(
        sdk.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER and chunks[-1].usage.completion_tokens == len(ANSWER_IDS) + 1
    completions = sdk.completions.create(model="default", prompt="hi", max_tokens=99, stream=True)
    assert "".join(chunk.choices[0].text for chunk in completions) == ANSWER


def test_openai_client_closes_a_stream(sdk, loop):
    loop.script = endless_script
    with sdk.completions.create(model="default", prompt="a", max_tokens=190, stream=True) as chunks:
        next(iter(chunks))
    loop.wait_until_idle()
    assert loop.aborted


def test_openai_client_errors(sdk, loop):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        sdk.completions.create(model="gpt", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        sdk.completions.create(model="default", prompt="hi", top_p=7)
    loop.max_queued = 0
    with pytest.raises(openai.InternalServerError):
        sdk.completions.create(model="default", prompt="hi")
    loop.reset()
    loop.script = lambda request: iter([65, -1])
    with pytest.raises(openai.APIError, match="the step failed"):
        list(sdk.completions.create(model="default", prompt="hi", stream=True))
