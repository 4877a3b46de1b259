"""A small model served by a real engine and loop, compiled once for all tests of this folder."""

import threading
from collections.abc import Iterator

import jax.numpy as jnp
import pytest
from prometheus_client import CollectorRegistry

from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.compilations import CompilationCounter
from jaxmoe.plan import make_plans
from jaxmoe.step import ShardedModel
from serving.engine import Engine, EngineLimits
from serving.loop import ServingLoop
from serving.metrics import LoopMetrics
from serving.pages import PagePool
from serving.peers import Alone
from serving.request import Output, Request, SamplingParams
from serving.scheduler import Scheduler


LIMITS = EngineLimits(max_running=4, chunk_tokens=32, context_length=128, page_size=8, num_pages=41)


class NumberText:
    """Text of a model without a tokenizer: each token is its number and a blank."""

    def __init__(self, stop: tuple[str, ...] = ()):
        assert not stop, "stop strings are tested with real text"
        self.matched = None

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


class Client:
    """Submits requests to a loop and collects what comes back."""

    def __init__(self, loop: ServingLoop, registry: CollectorRegistry):
        self.loop = loop
        self.registry = registry
        self._count = 0

    def submit(self, prompts: list[list[int]], params: list[SamplingParams]) -> "list[Answer]":
        answers = []
        for prompt, param in zip(prompts, params, strict=True):
            self._count += 1
            answers.append(Answer(f"request-{self._count}", list(prompt), param))
        self.loop.submit([answer.request for answer in answers])
        return answers

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> "list[Answer]":
        answers = self.submit(prompts, params)
        for answer in answers:
            answer.wait()
        return answers

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"jaxmoe_{name}", labels)
        return 0.0 if value is None else value


class Answer:
    def __init__(self, rid: str, prompt: list[int], params: SamplingParams):
        self.outputs: list[Output] = []
        self.first = threading.Event()
        self.ended = threading.Event()
        self.request = Request(rid, prompt, params, self._take)

    def _take(self, output: Output) -> None:
        assert not self.ended.is_set(), "an output after the last one"
        self.outputs.append(output)
        self.first.set()
        if output.finish_reason is not None:
            self.ended.set()

    def wait(self, timeout: float = 120) -> "Answer":
        assert self.ended.wait(timeout), f"{self.request.rid} did not end"
        return self

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[-1].finish_reason


@pytest.fixture(scope="session")
def compilations() -> CompilationCounter:
    return CompilationCounter()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ShardedModel:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"], seed=1, dtype="float32")
    return load_model(directory, sharding.make_mesh(4), dtype=jnp.float32)


@pytest.fixture(scope="session")
def engine(tiny_model: ShardedModel) -> Engine:
    prefill, decode = make_plans(
        "auto",
        ep_size=tiny_model.mesh.size,
        slots_per_rank=tiny_model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
    )
    engine = Engine(tiny_model, LIMITS, prefill=prefill, decode=decode)
    engine.warmup(Alone())
    return engine


@pytest.fixture
def client(engine: Engine, compilations: CompilationCounter) -> Iterator[Client]:
    """A running loop. When the test is over, nothing was compiled and every page is free."""
    registry = CollectorRegistry()
    metrics = LoopMetrics(registry, compilations)
    pools = [PagePool(LIMITS.num_pages, LIMITS.page_size) for _ in range(engine.num_ranks)]
    scheduler = Scheduler(pools, LIMITS.scheduler_limits)
    loop = ServingLoop(
        engine, scheduler, NumberText, metrics, Alone(), eos_token_ids=(1,), max_queued=100
    )
    metrics.mark_ready()
    loop.start()
    client = Client(loop, registry)
    yield client
    loop.shutdown()
    assert all(pool.num_free == pool.num_usable for pool in pools)
    assert loop.num_waiting == loop.num_running == 0
    assert client.metric("compilations_after_ready") == 0
