"""What separate prefill and decode workers do for latency, and how fast caches are moved.

    python benchmarks/pd.py --output pd.json

"latency": requests decode, streamed over HTTP, while long prompts arrive at a fixed rate. In turns,
one server with all cores, and a prefill and a decode worker behind a router with half the cores
each and, together, as many devices; the same requests, new ones in each round, whose greedy answers
must be equal. Times are those of the client, which shares the cores, as the router does. The time
between tokens is that of the decoding requests from the first long prompt to the last one's first
token; the parts of the time to the first token are the workers' own, of all requests.

"transfer": blocks of pages of DeepSeek-V3's shape, from one process to another, through each
backend with and without checksums, beside a copy of the same bytes in one process.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import report
from prompts import Prompts
from servers import Server, wait_until_healthy
from serving.kv_transfer import nixl
from serving.kv_transfer.backends import BACKENDS, make_backend
from serving.kv_transfer.messages import CODEC, Pages, Ping, TransferConnection, Welcome


HOST = "127.0.0.1"
SECONDS = 60.0  # that pages may take to come
SERVER_FLAGS = (
    "serve", "--port=0", "--log-level=warning", "--max-running-requests=16",
    "--max-total-tokens=32768", "--context-length=2048",
)  # fmt: skip
PARTS = ("queue", "prefill", "transfer", "first_decode")


@dataclasses.dataclass(frozen=True)
class Load:
    """`num_streams` clients decode `num_short` short prompts each, one after the other; beside them
    come `num_long` long prompts, one every `interval` seconds."""

    num_streams: int = 8
    num_short: int = 6
    new_tokens: int = 96
    num_long: int = 8
    long_tokens: int = 1400
    interval: float = 1.0


QUICK_LOAD = Load(
    num_streams=2, num_short=1, new_tokens=64, num_long=2, long_tokens=600, interval=0.1
)
LONG_NEW_TOKENS = 4
SHORT_TOKENS = 48

# Pages of V3: 64 tokens, 61 layers, 512 + 64 latent dimensions. As many as 256 tokens fill.
PAGES = (1, 4, 61, 64, 576)
QUICK_PAGES = (1, 1, 61, 64, 576)
NUM_BLOCKS = 16


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    jax.config.update("jax_platforms", "cpu")
    document: dict[str, Any] = {
        "benchmark": "pd",
        **report.origin(),
        "machine": report.machine() | {"load_before": os.getloadavg()[0]},
        "versions": report.versions("jax", "jaxlib", "httpx"),
    }
    load = QUICK_LOAD if args.quick else Load()
    document["latency"] = measure_latency(load, args.rounds)
    shape = QUICK_PAGES if args.quick else PAGES
    document["transfer"] = measure_transfers(shape, args.rounds)
    report.write(args.output, report.rounded(document))
    print_tables(document)
    return int(document["latency"]["num_different"] > 0)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="turns of each (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--quick", action="store_true", help="few and small requests and blocks")
    return parser.parse_args(argv)


# Latency


@dataclasses.dataclass(frozen=True)
class Target:
    """`url` takes the requests; `server` has the times of their parts."""

    url: str
    server: Server


@dataclasses.dataclass(frozen=True)
class Answer:
    """`times` of its events, each with a token."""

    asked: float
    times: list[float]
    token_ids: list[int]

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.asked


@dataclasses.dataclass(frozen=True)
class Round:
    """`prompts_and_new_tokens` and `seconds` count for the rate."""

    short: list[Answer]
    long: list[Answer]
    num_tokens: int
    seconds: float

    def gaps(self) -> list[float]:
        """Between tokens of short requests, while long ones arrive."""
        begin = min(answer.asked for answer in self.long)
        end = max(answer.times[0] for answer in self.long)
        return [
            after - before
            for answer in self.short
            for before, after in zip(answer.times, answer.times[1:], strict=False)
            if after >= begin and before <= end
        ]

    def token_ids(self) -> list[list[int]]:
        return [answer.token_ids for answer in (*self.short, *self.long)]


def measure_latency(load: Load, num_rounds: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    halves = set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])
    with tempfile.TemporaryDirectory() as logs, start_servers(Path(logs), *halves) as targets:
        warm_up = dataclasses.replace(load, num_long=1)
        asyncio.run(take_turns(targets, warm_up, range(1)))
        before = {name: target.server.metrics() for name, target in targets.items()}
        rounds = asyncio.run(take_turns(targets, load, range(1, 1 + num_rounds)))
        after = {name: target.server.metrics() for name, target in targets.items()}
    one, other = ([round.token_ids() for round in each] for each in rounds.values())
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return {
        "load": dataclasses.asdict(load),
        "rounds": num_rounds,
        "cores": {"unified": cores, "prefill": sorted(halves[0]), "decode": sorted(halves[1])},
        **{
            name: summary(each) | {"part_ms": parts(before[name], after[name])}
            for name, each in rounds.items()
        },
        "num_answers": len(pairs),
        "num_different": sum(a != b for a, b in pairs),
    }


@contextlib.contextmanager
def start_servers(
    logs: Path, prefill_cores: set[int], decode_cores: set[int]
) -> Iterator[dict[str, Target]]:
    """Both targets, with 4 devices each; the one that is not asked is idle."""
    environment = {"JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:

        def start(name: str, *flags: str, cores: set[int] | None = None) -> Server:
            server = Server(*flags, log=logs / f"{name}.log", cores=cores, environment=environment)
            return stack.enter_context(server)

        router = start("router", "router", "--port=0", "--log-level=warning")
        router.wait_until_ready()
        worker = (*SERVER_FLAGS, "--ep-size=2", f"--router={router.url}")
        unified = start("unified", *SERVER_FLAGS, "--ep-size=4")
        prefill = start(
            "prefill", *worker, "--disaggregation-mode=prefill",
            "--disaggregation-bootstrap-port=0", cores=prefill_cores,
        )  # fmt: skip
        decode = start("decode", *worker, "--disaggregation-mode=decode", cores=decode_cores)
        for server in (unified, prefill, decode):
            server.wait_until_ready()
        wait_until_healthy(router.url)
        yield {"unified": Target(unified.url, unified), "apart": Target(router.url, decode)}


async def take_turns(
    targets: dict[str, Target], load: Load, seeds: Sequence[int]
) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {name: [] for name in targets}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        for seed in seeds:
            short, long = make_prompts(load, seed)
            for name, target in targets.items():
                rounds[name].append(await run_round(client, target.url, load, short, long))
    return rounds


def make_prompts(load: Load, seed: int) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Short prompts of each stream, and long ones; none was there before, so none is cached."""
    draw = Prompts(seed).draw
    short = [[draw(SHORT_TOKENS) for _ in range(load.num_short)] for _ in range(load.num_streams)]
    return short, [draw(load.long_tokens) for _ in range(load.num_long)]


async def run_round(
    client: httpx.AsyncClient,
    url: str,
    load: Load,
    short: list[list[list[int]]],
    long: list[list[int]],
) -> Round:
    async def stream(prompts: list[list[int]]) -> list[Answer]:
        return [await ask(client, url, prompt, load.new_tokens) for prompt in prompts]

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(prompts)) for prompts in short]
        arrivals = []
        for prompt in long:
            await asyncio.sleep(load.interval)
            arrivals.append(tasks.create_task(ask(client, url, prompt, LONG_NEW_TOKENS)))
    took = time.perf_counter() - began
    answers = [answer for task in streams for answer in task.result()]
    late = [task.result() for task in arrivals]
    num_prompt_tokens = sum(len(prompt) for prompts in (*short, long) for prompt in prompts)
    num_new_tokens = sum(len(answer.token_ids) for answer in (*answers, *late))
    return Round(answers, late, num_prompt_tokens + num_new_tokens, took)


async def ask(client: httpx.AsyncClient, url: str, prompt: list[int], new_tokens: int) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    asked, times, last = time.perf_counter(), [], ""
    async with client.stream("POST", f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                last = line
    event = json.loads(last.removeprefix("data: "))
    if "error" in event:
        raise RuntimeError(f"{url} answered {event}")
    return Answer(asked, times, event["output_ids"])


def summary(rounds: list[Round]) -> dict[str, Any]:
    short = [answer for each in rounds for answer in each.short]
    long = [answer for each in rounds for answer in each.long]
    return {
        "inter_token_ms": spread([gap for each in rounds for gap in each.gaps()]),
        "inter_token_p99_ms_of_rounds": [spread(each.gaps())["p99"] for each in rounds],
        "first_token_ms_of_long": spread([answer.first_token_seconds for answer in long]),
        "first_token_ms_of_short": spread([answer.first_token_seconds for answer in short]),
        "tokens_per_s": statistics.median(each.num_tokens / each.seconds for each in rounds),
    }


def spread(seconds: list[float]) -> dict[str, float]:
    values = 1e3 * np.asarray(seconds)
    quantiles = zip(("median", "p99", "max"), np.quantile(values, (0.5, 0.99, 1)), strict=True)
    return {"count": len(values), **{name: float(value) for name, value in quantiles}}


def parts(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Mean milliseconds of each part between two readings."""
    means = {}
    for part in PARTS:
        total, count = (
            after.get(name, 0.0) - before.get(name, 0.0)
            for of in ("sum", "count")
            for name in [f'jaxmoe_time_to_first_token_part_seconds_{of}{{part="{part}"}}']
        )
        if count:
            means[part] = 1e3 * total / count
    return means


# Transfer


def measure_transfers(shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    block = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    num_bytes = NUM_BLOCKS * block.size * block.dtype.itemsize
    runs: dict[str, Callable[[], object]] = {"copy": copy_of(block)}
    with contextlib.ExitStack() as stack:
        for name in BACKENDS:
            if name == "nixl" and (reason := nixl_is_missing()):
                print(f"nixl is left out: {reason}")
                continue
            for checksums in (False, True):
                key = f"{name}, checksums" if checksums else name
                runs[key] = stack.enter_context(linked(name, checksums, block))
        rates: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(repeats):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                rates[name].append(num_bytes / (time.perf_counter() - began) / 1e9)
    return {
        "block": shape,
        "bytes_of_a_turn": num_bytes,
        "gb_per_s": {
            name: {"median": statistics.median(each), "min": min(each), "max": max(each)}
            for name, each in rates.items()
        },
    }


def nixl_is_missing() -> str | None:
    try:
        nixl.check_installed()
    except ValueError as error:
        return str(error)
    return None


def content(block: jax.ShapeDtypeStruct) -> np.ndarray:
    words = np.random.default_rng(0).standard_normal(block.shape, np.float32)
    return words.astype(block.dtype)


def copy_of(block: jax.ShapeDtypeStruct) -> Callable[[], None]:
    source = np.stack([content(block)] * NUM_BLOCKS)
    copy = np.zeros_like(source)
    return lambda: np.copyto(copy, source)


@contextlib.contextmanager
def linked(
    name: str, checksums: bool, block: jax.ShapeDtypeStruct
) -> Iterator[Callable[[], jax.Array]]:
    """Brings `NUM_BLOCKS` blocks from another process, and returns the last one."""
    backend = make_backend(name, HOST, block, checksums=checksums, timeout=SECONDS)
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(SECONDS)
        port = listener.getsockname()[1]
        process = multiprocessing.get_context("spawn").Process(
            target=send_blocks, args=(port, name, checksums, block), daemon=True
        )
        process.start()
        connection = TransferConnection(listener.accept()[0], CODEC)
    place = SingleDeviceSharding(jax.devices()[0])

    def run() -> jax.Array:
        connection.send(Ping())
        for _ in range(NUM_BLOCKS):
            pages = connection.receive()
            assert isinstance(pages, Pages)
            arrived = jax.block_until_ready(receiver.receive(pages, place))
        return arrived

    try:
        welcome = connection.receive()
        assert isinstance(welcome, Welcome)
        with contextlib.closing(backend.receiver(connection, HOST, welcome.endpoint)) as receiver:
            found = np.asarray(run())
            if not np.array_equal(found.view(np.uint16), content(block).view(np.uint16)):
                raise RuntimeError(f"what {name} brought is not what was sent")
            yield run
    finally:
        connection.close()
        process.join()


def send_blocks(port: int, name: str, checksums: bool, block: jax.ShapeDtypeStruct) -> None:
    """The process at the other end: sends blocks whenever it is asked to."""
    jax.config.update("jax_platforms", "cpu")
    backend = make_backend(name, HOST, block, checksums=checksums, timeout=SECONDS)
    array = jax.device_put(content(block))
    connection = TransferConnection(socket.create_connection((HOST, port)), CODEC)
    with contextlib.closing(backend.sender(connection)) as sender:
        connection.send(Welcome(sender.endpoint))
        while connection.receive() is not None:
            for index in range(NUM_BLOCKS):
                sender.send(Pages(index, 0, block.shape[1]), array)
    connection.close()


def print_tables(document: dict[str, Any]) -> None:
    latency = document["latency"]
    one, other = latency["unified"], latency["apart"]
    print(f"{'ms':32}{'unified':>10}{'apart':>10}")
    for key in ("inter_token_ms", "first_token_ms_of_long", "first_token_ms_of_short"):
        for name in ("median", "p99", "max"):
            print(f"{key[:-3] if key.endswith('_ms') else key} {name}".ljust(32), end="")
            print(f"{one[key][name]:10.1f}{other[key][name]:10.1f}")
    for part in PARTS:
        cells = (each["part_ms"].get(part) for each in (one, other))
        print(f"{part:32}" + "".join(f"{'-' if x is None else f'{x:.1f}':>10}" for x in cells))
    print(f"{'tokens/s':32}{one['tokens_per_s']:10.0f}{other['tokens_per_s']:10.0f}")
    print(f"{latency['num_different']} of {latency['num_answers']} answers differ")
    print(f"{'GB/s':32}{'median':>10}")
    for name, rates in document["transfer"]["gb_per_s"].items():
        print(f"{name:32}{rates['median']:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
