"""HTTP in front of a worker of one role: where prompts come from, and what is said when they do not
come. The loop is a stub that answers at once."""

import asyncio
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from jaxmoe.tokenizer import Tokenizer
from serving.http.app import make_app
from serving.http.protocol import ModelInfo
from serving.lockstep import Record
from serving.request import Output, Request
from serving.roles import Role


TOKENIZER = Tokenizer.load(Path(__file__).parent.parent / "byte_tokenizer")
INFO = ModelInfo("tiny", "tiny", 320, 200, (257,), page_size=16)
PREFILL = {"X-Prefill-Address": "10.0.0.7:8998"}
LOST = Output(finish_reason="error", error="10.0.0.7:8998: gone", failed_peer="10.0.0.7:8998")
GIVEN = Output(text="A", token_ids=(65,))
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}


class StubLoop:
    """Gives every request these outputs."""

    error = None
    is_accepting = True
    num_waiting = 3
    num_running = 2

    def __init__(self, *outputs: Output):
        self.outputs = outputs
        self.requests: list[Request] = []

    def submit(self, requests: list[Request]) -> None:
        self.requests += requests
        for request in requests:
            for output in self.outputs:
                request.sink(output)

    def abort(self, rid: str) -> bool:
        return False

    def abort_all(self) -> int:
        return 0

    def flush_cache(self) -> None:
        pass

    def record(self, what: Record) -> list[str]:
        return []


def ask(
    loop: StubLoop, role: Role, method: str, path: str, address: str | None = None, **options
) -> httpx.Response:
    app = make_app(loop, TOKENIZER, INFO, CollectorRegistry(), role=role, transfer_address=address)

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await client.request(method, path, **options)

    return asyncio.run(call())


@pytest.mark.parametrize("path", BODIES)
def test_a_decode_worker_is_told_who_prefills(path):
    loop = StubLoop(Output(text="A", token_ids=(65,), finish_reason="length"))
    answer = ask(loop, Role.DECODE, "POST", path, json=BODIES[path], headers=PREFILL)
    assert answer.status_code == 200, answer.text
    assert [request.prefill_address for request in loop.requests] == ["10.0.0.7:8998"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("role", "headers", "message"),
    [
        (Role.DECODE, {}, "needs to be told in X-Prefill-Address which worker computes prompts"),
        (Role.DECODE, {"X-Prefill-Address": "10.0.0.7"}, "must be HOST:PORT with a port"),
        (Role.DECODE, {"X-Prefill-Address": "10.0.0.7:0"}, "between 1 and 65535, got 10.0.0.7:0"),
        (Role.PREFILL, {}, "a prefill worker answers no requests"),
        (Role.PREFILL, PREFILL, "a prefill worker answers no requests"),
        (Role.UNIFIED, PREFILL, "this is no decode worker, got 10.0.0.7:8998"),
    ],
)
def test_what_a_role_cannot_do_is_refused(path, role, headers, message):
    loop = StubLoop()
    answer = ask(loop, role, "POST", path, json=BODIES[path], headers=headers)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert not loop.requests


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_that_does_not_come_is_a_503_that_names_the_peer(path, is_streamed):
    body = {**BODIES[path], "stream": is_streamed}
    answer = ask(StubLoop(LOST), Role.DECODE, "POST", path, json=body, headers=PREFILL)
    assert answer.status_code == 503
    assert answer.headers["X-Failed-Peer"] == "10.0.0.7:8998"
    assert answer.headers["Retry-After"] == "1"
    assert "gone" in answer.json()["error"]["message"]


class HalfLostLoop(StubLoop):
    """The first request is lost; the others end a while after they are told to."""

    def submit(self, requests: list[Request]) -> None:
        first, *others = requests
        self.going_on = {request.rid: request for request in others}
        first.sink(LOST)

    def abort(self, rid: str) -> bool:
        def end() -> None:
            if request := self.going_on.pop(rid, None):
                request.sink(Output(finish_reason="abort"))

        threading.Timer(0.1, end).start()
        return rid in self.going_on


@pytest.mark.parametrize("is_streamed", [False, True])
def test_ids_are_free_again_when_a_client_is_told_of_a_failure(is_streamed):
    """A router asks the same worker again at once, for another prefill worker to do it."""
    loop = HalfLostLoop()
    body = {"prompt": ["a", "b", "c"], "rid": ["1", "2", "3"], "stream": is_streamed}
    answer = ask(loop, Role.DECODE, "POST", "/v1/completions", json=body, headers=PREFILL)
    assert answer.status_code == 503
    assert not loop.going_on


def test_what_fails_after_the_first_token_ends_a_stream_with_an_error():
    body = {**BODIES["/v1/completions"], "stream": True}
    answer = ask(
        StubLoop(GIVEN, LOST), Role.DECODE, "POST", "/v1/completions", json=body, headers=PREFILL
    )
    assert answer.status_code == 200
    first, error, done = answer.text.strip().split("\n\n")
    assert '"text":"A"' in first and "gone" in error and done == "data: [DONE]"


@pytest.mark.parametrize(
    ("role", "headers", "status"),
    [(Role.PREFILL, {}, 200), (Role.DECODE, PREFILL, 200), (Role.DECODE, {}, 400)],
)
def test_one_token_for_the_health_check(role, headers, status):
    loop = StubLoop(Output(text="A", token_ids=(65,), finish_reason="length"))
    answer = ask(loop, role, "GET", "/health_generate", headers=headers)
    assert answer.status_code == status
    assert ask(loop, role, "GET", "/health").status_code == 200


def test_a_lost_health_check_names_the_peer():
    answer = ask(StubLoop(LOST), Role.DECODE, "GET", "/health_generate", headers=PREFILL)
    assert answer.status_code == 503 and answer.headers["X-Failed-Peer"] == "10.0.0.7:8998"


@pytest.mark.parametrize("is_accepting", [False, True])
def test_a_worker_says_what_it_is(is_accepting):
    loop = StubLoop()
    loop.is_accepting = is_accepting
    answer = ask(loop, Role.PREFILL, "GET", "/disaggregation", "10.0.0.7:8998")
    assert answer.json() == {
        "mode": "prefill",
        "transfer_address": "10.0.0.7:8998",
        "model": "tiny",
        "page_size": 16,
        "num_running": 2,
        "num_waiting": 3,
        "draining": not is_accepting,
    }
    assert ask(loop, Role.UNIFIED, "GET", "/disaggregation").json()["mode"] == "null"
