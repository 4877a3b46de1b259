"""A small model served by a real engine and loop, compiled once for all tests of this folder."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from prometheus_client import CollectorRegistry

from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.compilations import CompilationCounter
from jaxmoe.plan import make_plans
from jaxmoe.step import ShardedModel
from serving.engine import Engine, EngineLimits, StepResult
from serving.kv_transfer.arrivals import Fetches
from serving.loop import ServingLoop
from serving.metrics import LoopMetrics
from serving.pages import PagePool
from serving.peers import Alone, Peers
from serving.rebalancer import Rebalancer
from serving.recorder import Recorder, RecorderOptions
from serving.request import Output, Request, SamplingParams, TokenLogprob
from serving.roles import Role
from serving.scheduler import ScheduledBatch, ScheduledDecode, Scheduler


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

    def __init__(
        self,
        loop: ServingLoop,
        registry: CollectorRegistry,
        pools: list[PagePool],
        engine: Engine,
        scheduler: Scheduler | None = None,
    ):
        self.loop = loop
        self.registry = registry
        self.engine = engine
        self._scheduler = scheduler
        self._pools = pools
        self._count = 0

    def check_free(self) -> None:
        """No request holds a page, and all are free once nothing is kept cached. For a loop that
        has ended."""
        assert self._scheduler is not None
        self._scheduler.check_integrity()
        assert self._scheduler.page_usage == 0
        self._scheduler.forget_cached()
        assert all(pool.num_free == pool.num_usable for pool in self._pools)
        assert self.loop.num_waiting == self.loop.num_running == 0

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


@pytest.fixture
def new_answer() -> type[Answer]:
    """`new_answer(rid, prompt, params)`, whose `request` is to be submitted."""
    return Answer


class ThreadGroup:
    """Members that are threads of this process. `kill` makes one die for the others."""

    def __init__(self, num_members: int):
        self.condition = threading.Condition()
        self.proposals: dict[int, tuple[int, ...]] = {}
        self.decided: list[tuple[int, ...]] = []
        self.round = 0
        self.awake = [False] * num_members
        self.dead: int | None = None
        self.num_recoveries = [0] * num_members
        self.members = [ThreadPeers(self, member) for member in range(num_members)]

    def kill(self, member: int) -> None:
        with self.condition:
            self.dead = member
            self.condition.notify_all()


class ThreadPeers:
    """One member's view of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, member: int):
        self.member = member
        self._group = group

    @property
    def num_members(self) -> int:
        return len(self._group.members)

    def agree(self, proposal: Sequence[int]) -> list[tuple[int, ...]]:
        group = self._group
        with group.condition:
            this_round = group.round
            group.proposals[self.member] = tuple(proposal)
            if len(group.proposals) == self.num_members:
                group.decided = [group.proposals[k] for k in range(self.num_members)]
                group.proposals = {}
                group.round += 1
            group.condition.notify_all()
            group.condition.wait_for(
                lambda: group.round != this_round or group.dead is not None, timeout=120
            )
            if group.round == this_round:
                raise RuntimeError(f"member {group.dead} is gone")
            return group.decided

    def wait(self) -> None:
        group = self._group
        with group.condition:
            group.condition.wait_for(
                lambda: group.awake[self.member] or group.proposals or group.dead is not None
            )
            group.awake[self.member] = False

    def wake(self) -> None:
        with self._group.condition:
            self._group.awake[self.member] = True
            self._group.condition.notify_all()

    def recover(self) -> None:
        self._group.num_recoveries[self.member] += 1
        self.agree(())


@pytest.fixture
def thread_group() -> ThreadGroup:
    return ThreadGroup(2)


@pytest.fixture(scope="session")
def compilations() -> CompilationCounter:
    return CompilationCounter()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"], seed=1, dtype="float32")
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> ShardedModel:
    return load_model(tiny_checkpoint, sharding.make_mesh(4), dtype=jnp.float32)


def make_engine(model: ShardedModel, role: Role = Role.UNIFIED) -> Engine:
    prefill, decode = make_plans(
        "auto",
        ep_size=model.mesh.size,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
    )
    return Engine(model, LIMITS, prefill=prefill, decode=decode, role=role)


@pytest.fixture(scope="session")
def engine(tiny_model: ShardedModel) -> Engine:
    engine = make_engine(tiny_model)
    engine.warmup(Alone())
    return engine


@pytest.fixture(scope="session")
def other_engine(tiny_checkpoint: Path) -> Engine:
    """The same model on the other four devices. Not warmed up: it compiles what a test runs."""
    mesh = sharding.make_mesh(4, jax.devices()[4:])
    return make_engine(load_model(tiny_checkpoint, mesh, dtype=jnp.float32))


@pytest.fixture(scope="session")
def decode_engine(tiny_model: ShardedModel) -> Engine:
    engine = make_engine(tiny_model, Role.DECODE)
    engine.warmup(Alone())
    return engine


@pytest.fixture(scope="session")
def prefill_engine(tiny_checkpoint: Path) -> Engine:
    """Of two ranks, beside those of the decode engine."""
    mesh = sharding.make_mesh(2, jax.devices()[4:6])
    engine = make_engine(load_model(tiny_checkpoint, mesh, dtype=jnp.float32), Role.PREFILL)
    engine.warmup(Alone())
    return engine


class StubEngine(Engine):
    """Answers at once: each token is how many there were before it."""

    def __init__(self) -> None:
        self.num_ranks = 1
        self.limits = EngineLimits(
            max_running=4, chunk_tokens=32, context_length=200_000, page_size=64, num_pages=4000
        )
        self.entered = threading.Event()
        """A step has begun."""
        self.may_step = threading.Event()
        self.may_step.set()
        self.fails = False

    def run(self, batch: ScheduledBatch, size: int) -> list[StepResult]:
        self.entered.set()
        assert self.may_step.wait(60)
        if self.fails:
            raise RuntimeError("injected")
        if isinstance(batch, ScheduledDecode):
            return [self._answer(r, r.num_tokens, True) for r in batch.all_requests]
        chunks = [chunk for of_rank in batch.chunks for chunk in of_rank]
        return [self._answer(c.request, c.stop, c.is_last) for c in chunks]

    def reset_cache(self) -> None:
        pass

    def _answer(self, request: Request, num_computed: int, has_token: bool) -> StepResult:
        token = TokenLogprob(request.num_tokens, -0.5) if has_token else None
        return StepResult(request, num_computed, token, {})


def make_client(
    engine: Engine,
    compilations: CompilationCounter,
    peers: Peers,
    *,
    prefix_cache: bool = True,
    rebalancer: Rebalancer | None = None,
    recorder_options: RecorderOptions | None = None,
    num_pages: int | None = None,
    fetcher: Fetches | None = None,
) -> Client:
    """`num_pages`: of a rank, fewer than the engine has."""
    registry = CollectorRegistry()
    metrics = LoopMetrics(registry, compilations)
    limits = engine.limits
    size = num_pages or limits.num_pages
    pools = [PagePool(size, limits.page_size) for _ in range(engine.num_ranks)]
    scheduler = Scheduler(
        pools, limits.scheduler_limits, prefix_cache=prefix_cache, prefills=fetcher is None
    )
    loop = ServingLoop(
        engine,
        scheduler,
        NumberText,
        metrics,
        peers,
        eos_token_ids=(1,),
        max_queued=100,
        recorder=Recorder(engine, peers, recorder_options or RecorderOptions()),
        rebalancer=rebalancer,
        fetcher=fetcher,
    )
    metrics.mark_ready()
    return Client(loop, registry, pools, engine, scheduler)


@pytest.fixture
def new_client(compilations: CompilationCounter) -> Callable[..., Client]:
    """`new_client(peers, engine, prefix_cache=True)`, by default with a stub of an engine; its loop
    is not started."""
    return lambda peers, engine=None, **options: make_client(
        engine or StubEngine(), compilations, peers, **options
    )


@contextlib.contextmanager
def running(client: Client) -> Iterator[Client]:
    """With its loop started. When it has ended, nothing was compiled and every page is free."""
    client.loop.start()
    try:
        yield client
    finally:
        client.loop.shutdown()
    client.check_free()
    assert client.metric("compilations_after_ready") == 0


@pytest.fixture(name="running")
def _running() -> Callable[[Client], contextlib.AbstractContextManager[Client]]:
    return running


@pytest.fixture
def client(engine: Engine, compilations: CompilationCounter) -> Iterator[Client]:
    with running(make_client(engine, compilations, Alone())) as client:
        yield client


@pytest.fixture
def clients(
    engine: Engine,
    other_engine: Engine,
    compilations: CompilationCounter,
    thread_group: ThreadGroup,
) -> Iterator[list[Client]]:
    """The running loops of a group's two members. When the test is over, every page is free, unless
    a member was killed."""
    clients = [
        make_client(member_engine, compilations, peers)
        for member_engine, peers in zip((engine, other_engine), thread_group.members, strict=True)
    ]
    for client in clients:
        client.loop.start()
    yield clients
    shut_down([client.loop for client in clients])
    if thread_group.dead is None:
        for client in clients:
            client.check_free()


@pytest.fixture
def lone_tokens(
    engine: Engine, compilations: CompilationCounter
) -> Callable[[list[list[int]], SamplingParams], list[list[int]]]:
    """What one loop alone answers to these prompts."""

    def answer(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        client = make_client(engine, compilations, Alone())
        client.loop.start()
        try:
            return [answer.token_ids for answer in client.run(prompts, [params] * len(prompts))]
        finally:
            client.loop.shutdown()

    return answer


def shut_down(loops: Sequence[ServingLoop], drain_timeout: float = 0.0) -> None:
    """All at a time: each waits for the others."""
    threads = [threading.Thread(target=loop.shutdown, args=(drain_timeout,)) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a loop does not stop"


@pytest.fixture(name="shut_down")
def _shut_down() -> Callable[..., None]:
    return shut_down
