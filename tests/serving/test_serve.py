"""`jaxmoe serve` as a user meets it: a process, the `openai` client, a signal."""

import concurrent.futures
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from serving import launch
from serving.cli import main
from tests.processes import Process


pytestmark = pytest.mark.slow

FLAGS = (
    "--port", "0", "--ep-size", "4", "--max-running-requests", "8", "--context-length", "256",
    "--chunked-prefill-size", "32", "--page-size", "16", "--compilation-cache-dir", "",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with Process("serving.cli", "serve", *FLAGS) as process:
        yield process.read_until(r"Ready: (\S+)")[1], process.process


@pytest.fixture(scope="module")
def client(server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    match = re.search(rf"^jaxmoe_{name} (\S+)$", text, re.MULTILINE)
    assert match is not None, name
    return float(match.group(1))


def wait_until_idle(url: str) -> None:
    deadline = time.monotonic() + 30
    while metric(url, "num_running_reqs") or metric(url, "num_queue_reqs"):
        assert time.monotonic() < deadline, "requests are still being served"
        time.sleep(0.05)


def test_completion_and_chat(client):
    done = client.completions.create(model="default", prompt="Hello", max_tokens=8, seed=1)
    again = client.completions.create(model="default", prompt="Hello", max_tokens=8, seed=1)
    assert done.choices[0].text == again.choices[0].text
    assert done.usage is not None and done.usage.completion_tokens <= 8
    messages = [{"role": "user", "content": "How are you?"}]
    chat = client.chat.completions.create(
        model="default", messages=messages, max_tokens=8, temperature=0, logprobs=True
    )
    pieces = client.chat.completions.create(
        model="default", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == chat.choices[0].message.content


def test_a_repeated_prompt_is_found_cached(server, client):
    url, _ = server
    messages = [{"role": "user", "content": "Sing a song of pages. " * 6}]

    def ask() -> tuple[str | None, int, int]:
        chat = client.chat.completions.create(
            model="default", messages=messages, max_tokens=8, temperature=0
        )
        assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
        details = chat.usage.prompt_tokens_details
        return chat.choices[0].message.content, chat.usage.prompt_tokens, details.cached_tokens or 0

    text, num_prompt, num_cached = ask()
    assert num_cached == 0
    assert ask() == (text, num_prompt, (num_prompt - 1) // 16 * 16)
    assert metric(url, "cached_tokens_total") >= (num_prompt - 1) // 16 * 16 > 0
    assert 0 < metric(url, "cache_hit_rate") < 1
    assert metric(url, "cached_pages") > 0
    assert httpx.post(f"{url}/flush_cache").status_code == 200
    assert metric(url, "cached_pages") == 0
    assert ask() == (text, num_prompt, 0)


def test_one_request_alone_and_among_others(client):
    def ask(index: int) -> str:
        return (
            client.completions.create(
                model="default",
                prompt=f"Request {index}: " + "word " * (index % 7),
                max_tokens=10 + index % 5,
                temperature=index % 2,
                seed=index,
                extra_body={"ignore_eos": True},
            )
            .choices[0]
            .text
        )

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, range(32)))
    assert [ask(index) for index in range(0, 32, 4)] == together[::4]


def test_200_requests_with_disconnects_leave_everything_free(server):
    url, _ = server
    rng = random.Random(0)
    plans = [(i, rng.choice(["finish", "stream", "leave", "leave early"])) for i in range(200)]

    def ask(plan: tuple[int, str]) -> None:
        index, manner = plan
        body = {
            "prompt": "x" * rng.randint(1, 60),
            "max_tokens": rng.randint(1, 40),
            "seed": index,
            "stream": manner != "finish",
            "ignore_eos": True,
        }
        if manner == "leave early":
            with pytest.raises(httpx.ReadTimeout):
                body |= {"stream": False, "max_tokens": 150}
                leaves = httpx.Timeout(30, read=0.02)
                httpx.post(f"{url}/v1/completions", json=body, timeout=leaves)
            return
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200
            for count, _ in enumerate(response.iter_lines()):
                if manner == "leave" and count == 3:
                    return

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        list(pool.map(ask, plans))
    wait_until_idle(url)
    assert metric(url, "token_usage") == 0
    assert httpx.post(f"{url}/flush_cache").status_code == 200
    assert httpx.get(f"{url}/health_generate").status_code == 200


def test_bad_input_is_refused_and_the_next_request_works(server, client):
    url, _ = server
    bad = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "temperature": "hot"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "temperature"
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 500}).status_code == 400
    other = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "gpt"})
    assert other.status_code == 404
    assert client.completions.create(model="default", prompt="a", max_tokens=1).choices


def test_nothing_was_compiled_and_the_end_is_graceful(server, client):
    """Last: it stops the server in the middle of an answer."""
    url, process = server
    assert metric(url, "compilations_after_ready") == 0
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True},
        timeout=60,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert process.wait(60) == 0


COMMAND = ("serve", "--log-level", "error", "--port", "0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-path", "nowhere"], "--model-path must be a directory, got 'nowhere'"),
        (["--ep-size", "0"], "--ep-size must be at least 1, got 0"),
        (["--context-length", "100000"], "must not exceed the model's max_position_embeddings"),
        (["--max-total-tokens", "64"], "must hold one sequence of context_length"),
        (["--ep-num-redundant-experts", "3", "--ep-size", "4"],
         "4 redundant experts give 36"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(flags, message, capsys, monkeypatch):
    """By the command in this process, whose devices and log are there already."""
    monkeypatch.setattr(launch, "prepare_devices", lambda *_: None)
    monkeypatch.setattr(launch.logging, "basicConfig", lambda **_: None)
    assert main([*COMMAND, *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


def test_a_process_that_is_refused_says_so_and_ends():
    done = subprocess.run(
        [sys.executable, "-m", "serving.cli", *COMMAND, "--host", "256.0.0.1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "cannot listen on 256.0.0.1" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
