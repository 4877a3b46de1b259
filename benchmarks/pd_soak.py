"""Random load and random faults on prefill and decode workers, and what must hold all the time.

    python benchmarks/pd_soak.py --minutes 30

A router, two prefill and two decode workers; prefill workers fail a tenth of their transfers.
Clients ask for answers that are known from a single server: prompts around the borders of pages and
chunks, one or several, with `n`, streamed and not; some leave and some abort. Meanwhile, one after
the other, a worker is killed and started again, a worker is stopped for longer than others wait
for it, and the router is killed and started again.

Each request must end in time, with the whole right answer or with an error that says so. When the
load has ended, nothing may be left at the workers, nothing may have been compiled, memory may not
have grown much, and every prompt must be answered once more. What was violated is printed, then a
line of JSON; the exit status is 1 if there was anything.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

import report
from prompts import Prompts
from servers import Server, wait_until_healthy


NUM_CLIENTS = 8
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 193, 257, 400, 447)
"""Of prompts, around pages of 16 tokens and chunks of 64."""
NEW_TOKENS = (1, 5, 17, 32)
SERVER_FLAGS = (
    "serve", "--ep-size=2", "--context-length=512", "--page-size=16",
    "--chunked-prefill-size=64", "--max-running-requests=8",
)  # fmt: skip
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAXMOE_TRANSFER_FAILURE_PROB": "0.1"}

PAUSE_SECONDS = (1.0, 6.0)  # between faults
DOWN_SECONDS = (0.0, 3.0)  # what is killed
STOPPED_SECONDS = 15.0  # what is stopped; others wait for it for 10 s
BOUND_SECONDS = 60.0  # of a request
IDLE_SECONDS = 30.0  # until nothing is left of the load
GROWTH_BYTES = 200 << 20  # of a worker's memory since it was ready
NUM_TRIES = 20  # of an answer when all is over: transfers still fail
NOT_LEFT = (
    "num_running_reqs", "num_queue_reqs", "num_transferring_reqs", "token_usage",
    "compilations_after_ready",
)  # fmt: skip
NOT_LEFT_IN_PREFILL = (*NOT_LEFT, "kv_transfers_unconfirmed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (%(default)s)")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        cluster = Cluster(Path(logs), stack)
        questions = know_answers(Path(logs), Prompts(args.seed))
        cluster.wait_until_ready()
        soak = Soak(cluster, questions, rng)
        asyncio.run(soak.run(60 * args.minutes))
    for violation in soak.violations:
        print(violation)
    document = {
        "benchmark": "pd_soak",
        **report.origin(),
        "machine": report.machine(),
        "minutes": args.minutes,
        "seed": args.seed,
        **soak.summary(),
    }
    print(json.dumps(report.rounded(document)))
    return int(bool(soak.violations))


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt, and the text of the right answers, by their number of tokens."""

    prompt: list[int]
    texts: dict[int, str]


def know_answers(logs: Path, prompts: Prompts) -> list[Question]:
    """What one server that serves alone says."""
    with Server(*SERVER_FLAGS, "--port=0", log=logs / "alone.log") as server:
        server.wait_until_ready()
        drawn = [prompts.draw(length) for length in LENGTHS]
        texts = {}
        for new_tokens in NEW_TOKENS:
            body = completion_body(drawn, new_tokens)
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=BOUND_SECONDS)
            texts[new_tokens] = [choice["text"] for choice in answer.json()["choices"]]
    by_prompt = (dict(zip(texts, each, strict=True)) for each in zip(*texts.values(), strict=True))
    return [Question(prompt, each) for prompt, each in zip(drawn, by_prompt, strict=True)]


class Cluster:
    """The router and the workers, each at a port that it keeps when it is started again."""

    def __init__(self, logs: Path, stack: contextlib.ExitStack):
        self._logs, self._stack = logs, stack
        self._num_started = 0
        router_port, *ports = free_ports(7)
        self._commands = {"router": ("router", f"--port={router_port}", "--log-level=warning")}
        self.url = f"http://127.0.0.1:{router_port}"
        for index, name in enumerate(("prefill 0", "prefill 1", "decode 0", "decode 1")):
            role, _ = name.split()
            self._commands[name] = (
                *SERVER_FLAGS,
                f"--port={ports[index]}",
                f"--disaggregation-mode={role}",
                f"--disaggregation-bootstrap-port={ports[4 + index % 2]}",
                f"--router={self.url}",
            )
        self.servers: dict[str, Server] = {}
        self._bytes_when_ready: dict[str, int] = {}
        for name in self._commands:
            self.start(name)

    @property
    def workers(self) -> dict[str, Server]:
        return {name: server for name, server in self.servers.items() if name != "router"}

    def start(self, name: str) -> None:
        self._num_started += 1
        log = self._logs / f"{self._num_started} {name}.log"
        server = Server(*self._commands[name], log=log, environment=ENVIRONMENT)
        self.servers[name] = self._stack.enter_context(server)

    def wait_until_ready(self) -> None:
        for name in self.servers:
            self.wait_for(name)
        wait_until_healthy(self.url)

    def wait_for(self, name: str) -> None:
        self.servers[name].wait_until_ready()
        self._bytes_when_ready[name] = self.servers[name].resident_bytes()

    def growth(self, name: str) -> int:
        """Bytes that a process has more than when it was ready."""
        return self.servers[name].resident_bytes() - self._bytes_when_ready[name]


def free_ports(number: int) -> list[int]:
    """Not of those that systems give to clients, who might have taken one when it is needed."""
    free = []
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
    return free[:number]


def completion_body(prompts: list[list[int]], new_tokens: int, **more: Any) -> dict[str, Any]:
    fixed = {"temperature": 0, "ignore_eos": True}
    return {"prompt": prompts, "max_tokens": new_tokens, **fixed, **more}


def generate_body(
    prompts: list[list[int]], new_tokens: int, *, n: int = 1, **more: Any
) -> dict[str, Any]:
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "n": n}
    return {"input_ids": prompts, "sampling_params": sampling, **more}


class RefusedError(Exception):
    """An answer that is an error and says so, with `status`; 200 if it is an event of a stream."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass
class Choice:
    """What a choice has brought; `reason` why it ended."""

    text: str = ""
    reason: str | None = None


class Soak:
    """Clients and faults, and what was found to be wrong."""

    def __init__(self, cluster: Cluster, questions: list[Question], rng: random.Random):
        self.violations: list[str] = []
        self._cluster = cluster
        self._questions = questions
        self._rng = rng
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._faults: collections.Counter[str] = collections.Counter()
        self._longest = 0.0
        self._growth: dict[str, int] = {}
        self._is_over = False
        self._router_is_up_since = 0.0

    async def run(self, seconds: float) -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_CLIENTS):
                    tasks.create_task(self._ask_again_and_again(client))
                await self._break_things(time.monotonic() + seconds)
                self._is_over = True
            await self._check_that_nothing_is_left()
            await self._check_that_all_is_answered(client)

    def summary(self) -> dict[str, Any]:
        return {
            "outcomes": dict(sorted(self._outcomes.items())),
            "faults": dict(self._faults),
            "longest_seconds": self._longest,
            "growth_mb": {name: grown / 2**20 for name, grown in self._growth.items()},
            "violations": len(self.violations),
        }

    # Load

    async def _ask_again_and_again(self, client: httpx.AsyncClient) -> None:
        while not self._is_over:
            outcome = await self._ask_somehow(client)
            self._outcomes[outcome] += 1
            if outcome not in ("right", "left", "aborted"):
                await asyncio.sleep(0.2)  # as long as there is a fault there may be many

    async def _ask_somehow(self, client: httpx.AsyncClient) -> str:
        rng = self._rng
        questions = rng.choices(self._questions, k=rng.choice((1, 1, 2, 3)))
        new_tokens, n = rng.choice(NEW_TOKENS), rng.choice((1, 1, 1, 2))
        rid = f"{rng.getrandbits(64):x}"
        path, make_body = rng.choice(
            (("/v1/completions", completion_body), ("/generate", generate_body))
        )
        body = make_body(
            [question.prompt for question in questions], new_tokens, n=n,
            stream=rng.random() < 0.5, rid=[f"{rid}-{i}" for i in range(len(questions))],
        )  # fmt: skip
        expected = [question.texts[new_tokens] for question in questions for _ in range(n)]
        match rng.choices(("wait", "leave", "abort"), (8, 1, 1))[0]:
            case "wait":
                return await self._judge(client, path, body, expected)
            case "leave":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0.0, 1.0)):
                        return await self._judge(client, path, body, expected)
                return "left"
            case _:
                aborting = asyncio.create_task(self._abort(client, f"{rid}-0"))
                try:
                    return await self._judge(client, path, body, expected, may_abort=True)
                finally:
                    aborting.cancel()

    async def _judge(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: dict[str, Any],
        expected: list[str],
        *,
        may_abort: bool = False,
    ) -> str:
        """What comes of a request."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                choices = await ask(client, self._cluster.url, path, body, len(expected))
        except TimeoutError:
            return self._violate(f"no end within {BOUND_SECONDS:g} s", body)
        except RefusedError as error:
            if 400 <= error.status < 500:
                return self._violate(f"{error.status} {error}", body)
            return "error event" if error.status == 200 else f"error {error.status}"
        except (ValueError, LookupError) as error:
            return self._violate(f"no answer: {error!r}", body)
        except httpx.TransportError as error:
            # A router that is killed ends what goes through it, without a word.
            if began < self._router_is_up_since:
                return "router gone"
            return self._violate(repr(error), body)
        finally:
            self._longest = max(self._longest, time.monotonic() - began)
        for text, choice in zip(expected, choices, strict=True):
            if not is_right(text, choice, may_abort=may_abort):
                return self._violate(f"{choice} is not {text!r}", body)
        return "aborted" if any(choice.reason == "abort" for choice in choices) else "right"

    async def _abort(self, client: httpx.AsyncClient, rid: str) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        with contextlib.suppress(httpx.TransportError):
            await client.post(f"{self._cluster.url}/abort_request", json={"rid": rid})

    def _violate(self, what: str, body: dict[str, Any] | None = None) -> str:
        asked = "" if body is None else f" (asked was {json.dumps(body)[-200:]})"
        self.violations.append(f"{time.strftime('%H:%M:%S')} {what}{asked}")
        return "violation"

    # Faults

    async def _break_things(self, deadline: float) -> None:
        faults = [self._kill_worker, self._kill_router, self._stop_worker]
        while time.monotonic() < deadline:
            for fault in faults:
                await asyncio.sleep(self._rng.uniform(*PAUSE_SECONDS))
                if time.monotonic() < deadline:
                    await fault()
            self._rng.shuffle(faults)

    async def _kill_worker(self) -> None:
        name = self._rng.choice(list(self._cluster.workers))
        self._faults[f"kill {name}"] += 1
        await self._kill_and_start(name)

    async def _kill_router(self) -> None:
        self._faults["kill router"] += 1
        self._router_is_up_since = math.inf
        await self._kill_and_start("router")
        self._router_is_up_since = time.monotonic()

    async def _kill_and_start(self, name: str) -> None:
        server = self._cluster.servers[name]
        self._check_runs(name, server)
        server.kill()
        await asyncio.sleep(self._rng.uniform(*DOWN_SECONDS))
        self._cluster.start(name)
        try:
            await asyncio.to_thread(self._cluster.wait_for, name)
        except RuntimeError as error:
            self._violate(str(error))

    async def _stop_worker(self) -> None:
        name = self._rng.choice(list(self._cluster.workers))
        self._faults[f"stop {name}"] += 1
        process = self._cluster.servers[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(STOPPED_SECONDS)
        finally:
            process.send_signal(signal.SIGCONT)

    def _check_runs(self, name: str, server: Server) -> None:
        if server.process.poll() is not None:
            self._violate(f"{name} has ended by itself: {server.last_lines()}")

    # The end

    async def _check_that_nothing_is_left(self) -> None:
        for name, server in self._cluster.servers.items():
            self._check_runs(name, server)
        left = await self._left()
        deadline = time.monotonic() + IDLE_SECONDS
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            left = await self._left()
        for each in left:
            self._violate(f"{each} {IDLE_SECONDS:g} s after the load")
        for name in self._cluster.workers:
            grown = self._growth[name] = self._cluster.growth(name)
            if grown > GROWTH_BYTES:
                self._violate(f"{name} has grown by {grown / 2**20:.0f} MB")

    async def _left(self) -> list[str]:
        """What is not 0 and must be."""
        found = []
        for name, server in self._cluster.workers.items():
            try:
                values = await asyncio.to_thread(server.metrics)
            except httpx.TransportError as error:
                found.append(f"{name} does not answer: {error!r}")
                continue
            found += [
                f"{metric} of {name} is {value}"
                for metric in (NOT_LEFT_IN_PREFILL if "prefill" in name else NOT_LEFT)
                if (value := values[f"jaxmoe_{metric}"])
            ]
        return found

    async def _check_that_all_is_answered(self, client: httpx.AsyncClient) -> None:
        for question in self._questions:
            body = completion_body([question.prompt], NEW_TOKENS[-1])
            expected = [question.texts[NEW_TOKENS[-1]]]
            for _ in range(NUM_TRIES):
                outcome = await self._judge(client, "/v1/completions", body, expected)
                if outcome in ("right", "violation"):
                    break
                await asyncio.sleep(0.2)
            else:
                self._violate(f"no answer in {NUM_TRIES} tries after the load", body)


def is_right(text: str, choice: Choice, *, may_abort: bool) -> bool:
    if choice.reason == "abort":
        # What was aborted within a character ends with a replacement for it.
        return may_abort and text.startswith(choice.text.rstrip("\ufffd"))
    return choice.reason == "length" and choice.text == text


async def ask(
    client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any], num_choices: int
) -> list[Choice]:
    """The choices of a whole answer.

    Raises RefusedError, httpx.TransportError, and ValueError or LookupError for what is no answer.
    """
    async with client.stream("POST", url + path, json=body) as response:
        if not response.is_success or not body.get("stream"):
            answer = json.loads(await response.aread())
            if not response.is_success:
                raise RefusedError(response.status_code, answer["error"]["message"])
            choices = answer["choices"] if path == "/v1/completions" else answer
            if len(choices) != num_choices:
                raise ValueError(f"{len(choices)} choices")
            return [read_choice(choice) for choice in choices]
        choices = [Choice() for _ in range(num_choices)]
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RefusedError(response.status_code, event["error"]["message"])
                for each in event["choices"] if path == "/v1/completions" else [event]:
                    update(choices[each["index"]], read_choice(each), path)
    if last != "data: [DONE]":
        raise ValueError(f"a stream ended with {last[-200:]!r}")
    return choices


def read_choice(choice: dict[str, Any]) -> Choice:
    """Of an answer of either endpoint."""
    if "meta_info" in choice:
        reason = choice["meta_info"]["finish_reason"]
        return Choice(choice["text"], reason and reason["type"])
    return Choice(choice["text"], choice["finish_reason"])


def update(choice: Choice, news: Choice, path: str) -> None:
    """`/generate` repeats all text so far in each event."""
    choice.text = choice.text + news.text if path == "/v1/completions" else news.text
    choice.reason = news.reason


if __name__ == "__main__":
    sys.exit(main())
