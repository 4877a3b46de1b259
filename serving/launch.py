"""From flags to a listening server: devices, weights, engine, loop, HTTP."""

import argparse
import contextlib
import dataclasses
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import jax
from prometheus_client import CollectorRegistry, Gauge

from custom_calls import runtime
from jaxmoe import sharding
from jaxmoe.assets import EMBEDDED_MODEL, EMBEDDED_MODEL_NAME
from jaxmoe.checkpoint import load_model
from jaxmoe.compilations import CompilationCounter
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.location import TRIVIAL, initial_slots
from jaxmoe.eplb.placement import num_expert_slots
from jaxmoe.eplb.relocate import Relocator, relocation_plan
from jaxmoe.plan import ExecutionPlan, make_plans, resolve_dtype, resolve_quantization
from jaxmoe.step import ShardedModel, join_ep_group
from jaxmoe.tokenizer import Tokenizer
from serving import pd
from serving.config import ServerConfig, add_arguments, from_arguments
from serving.disaggregation import Worker, make_fetcher, make_prefill_server
from serving.engine import Engine, EngineLimits
from serving.front import MemberGroup
from serving.http import server
from serving.http.app import make_app
from serving.http.protocol import ModelInfo
from serving.kv_transfer.fetcher import Fetcher
from serving.loop import ServingLoop
from serving.member import MemberLink
from serving.metrics import CountsCollector, GroupCollector, LoopMetrics, observe_rebalancer
from serving.overlap import TwoBatchLimits
from serving.pages import PagePool
from serving.peers import Alone, Peers
from serving.rebalancer import Rebalancer
from serving.recorder import Recorder
from serving.rendezvous import Rendezvous, join
from serving.roles import Role
from serving.scheduler import Scheduler
from serving.text import TextStream
from serving.wire import Hello, MemberConnection


__all__ = ["add_arguments", "run", "serve"]

logger = logging.getLogger(__name__)

DEFAULT_CPU_DEVICES = 8
FAILURE_VARIABLE = "JAXMOE_TRANSFER_FAILURE_PROB"
LOAD_TIMEOUT_SECONDS = 600.0  # that the slowest node may take to load more than the fastest


def run(args: argparse.Namespace) -> int:
    """`jaxmoe serve`."""
    config = from_arguments(args)
    return serve(config) if config.pd is None else pd.serve(config)


def serve(config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM; the exit status. Raises ValueError for what is refused."""
    server.set_up_logging(config.log_level)
    prepare_devices(config.ranks_per_node, config.compilation_cache_dir, config.base_gpu_id)
    try:
        if config.node_rank > 0:
            return _serve_as_member(config)
        with contextlib.ExitStack() as ports:
            listener = ports.enter_context(server.listen(config.host, config.port))
            transfers = None
            if config.role is Role.PREFILL:
                port = config.disaggregation_bootstrap_port
                transfers = ports.enter_context(server.listen(config.host, port))
            group_name, connections = "", []
            if config.nnodes > 1:
                assert config.dist_init_address is not None
                meeting = ports.enter_context(Rendezvous(*config.dist_init_address))
                group_name = secrets.token_hex(8)
                connections = meeting.gather(config.nnodes, _fingerprint(config), group_name)
            return _serve_http(config, listener, transfers, group_name, connections)
    except TimeoutError as error:
        raise ValueError(str(error)) from error
    finally:
        runtime.shutdown()


def _serve_http(
    config: ServerConfig,
    listener: socket.socket,
    transfers: socket.socket | None,
    group_name: str,
    connections: list[MemberConnection],
) -> int:
    """Member 0, or the only one. A prefill worker is reached by others through `transfers`."""
    node = start_node(config, group_name)
    worker = _make_worker(config, node, listener, transfers)
    loop: ServingLoop | MemberGroup = node.loop
    shown = node.registry
    if connections:
        loop = MemberGroup(node.loop, connections, max_queued=config.max_queued_requests)
        shown = CollectorRegistry()
        shown.register(GroupCollector(node.registry, loop.member_metrics))
    info = ModelInfo(
        served_model_name=config.served_model_name or _model_name(config),
        model_path=config.model_path or EMBEDDED_MODEL_NAME,
        vocab_size=node.model.config.vocab_size,
        context_length=node.engine.limits.context_length,
        eos_token_ids=node.model.config.eos_token_ids,
        page_size=node.engine.limits.page_size,
    )
    app = make_app(
        loop,
        node.tokenizer,
        info,
        shown,
        role=config.role,
        transfer_address=worker.transfer_address,
    )
    loop.start()
    node.metrics.mark_ready()

    def begin(url: str) -> None:
        server.announce(url, has_example=config.role is Role.UNIFIED)
        worker.start()

    server.run(
        app,
        listener,
        log_level=config.log_level,
        drain_timeout=config.drain_timeout,
        at_begin=begin,
        before_end=worker.leave,
    )
    # What decode workers wait for is no request of an HTTP client.
    loop.shutdown(config.drain_timeout if config.role is Role.PREFILL else 0.0)
    worker.close()
    return _exit_status(loop.error)


def _serve_as_member(config: ServerConfig) -> int:
    """Any other: it is handed requests by member 0, which also says when to stop."""
    assert config.dist_init_address is not None
    hello = Hello(config.node_rank, config.nnodes, _fingerprint(config))
    connection, welcome = join(config.dist_init_address, hello)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    node = start_node(config, welcome.group_name)
    node.metrics.mark_ready()
    logger.info("member %d of %d is ready", config.node_rank, config.nnodes)
    return _exit_status(MemberLink(node.loop, connection, node.registry).serve())


def _exit_status(error: str | None) -> int:
    if error is not None:
        logger.error("the serving loop died: %s", error)
        return 1
    return 0


@dataclasses.dataclass(frozen=True)
class Node:
    """What runs in one process."""

    model: ShardedModel
    tokenizer: Tokenizer
    engine: Engine
    loop: ServingLoop
    metrics: LoopMetrics
    registry: CollectorRegistry
    fetcher: Fetcher | None


def _make_worker(
    config: ServerConfig, node: Node, listener: socket.socket, transfers: socket.socket | None
) -> Worker:
    prefill = None
    if transfers is not None:
        prefill = make_prefill_server(
            config, node.engine, node.loop, transfers, _model_digest(config),
            _failure_probability(),
        )  # fmt: skip
        Gauge(
            "jaxmoe_kv_transfers_unconfirmed", "That decode workers have not said to be done with",
            registry=node.registry,
        ).set_function(partial(getattr, prefill, "num_unconfirmed"))  # fmt: skip
    worker = Worker(config, listener, node.fetcher, prefill, transfers)
    if worker.counts is not None:
        node.registry.register(CountsCollector("kv_transfer", worker.counts))
    return worker


def _failure_probability() -> float:
    """Of a prefill worker's transfers to fail, for tests."""
    text = os.environ.get(FAILURE_VARIABLE, "0")
    try:
        probability = float(text)
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise ValueError(f"{FAILURE_VARIABLE} must be a number between 0 and 1, got {text!r}")
    return probability


def start_node(config: ServerConfig, group_name: str) -> Node:
    """Load, join the expert-parallel group, warm up."""
    registry = CollectorRegistry()
    metrics = LoopMetrics(registry, CompilationCounter())
    directory = _model_directory(config)
    tokenizer = Tokenizer.load(directory)
    model = load(config, directory)
    limits = config.engine_limits(model.config, model.ranks.ep_size)
    plans = plans_of(config, model)
    members = runtime.Members(config.nnodes, config.node_rank, group_name, LOAD_TIMEOUT_SECONDS)
    most = max(limits.chunk_tokens, limits.max_running)
    moving = (relocation_plan(plans[0]),) if config.enable_eplb else ()
    used = config.role.plans(*plans)
    group = join_ep_group(model, used + moving, max_tokens=most, members=members)
    if group is not None:
        registry.register(CountsCollector("ep", group.counters))
    peers = group or Alone()
    engine = make_engine(model, limits, plans, config.two_batch_limits, config.role)
    if config.enable_two_batch_overlap:
        registry.register(CountsCollector("two_batch_overlap", lambda: engine.overlap.counts))
    _warm_up(engine, peers)
    rebalancer = None
    if config.enable_eplb:
        relocator = Relocator(model, *moving, rows_at_a_time=most)
        rebalancer = Rebalancer(engine, relocator, peers, config.eplb_options)
        rebalancer.warmup()
        observe_rebalancer(registry, rebalancer)
    recorder = Recorder(engine, peers, config.recorder_options)
    fetcher = None
    if config.role is Role.DECODE:
        fetcher = make_fetcher(config, engine, peers, _model_digest(config))
    loop = make_loop(
        config, engine, tokenizer, metrics, model.config, peers, recorder, rebalancer, fetcher
    )
    return Node(model, tokenizer, engine, loop, metrics, registry, fetcher)


def _model_digest(config: ServerConfig) -> str:
    return _digest(_model_directory(config) / "config.json")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _fingerprint(config: ServerConfig) -> dict[str, str]:
    """What must be equal on all nodes."""
    files = {"config.json of the model": _model_directory(config) / "config.json"}
    if config.init_expert_location != TRIVIAL:
        files["--init-expert-location"] = Path(config.init_expert_location)
    digests = {what: _digest(file) for what, file in files.items()}
    return config.fingerprint | {"jax": jax.__version__} | digests


def prepare_devices(
    ep_size: int | None, compilation_cache_dir: str | None, base_gpu_id: int | None = None
) -> None:
    """Set what must be set before JAX looks at its devices.

    On a machine with CPUs only, ranks are virtual devices. `base_gpu_id` needs `ep_size`.
    """
    if base_gpu_id is not None:
        assert ep_size is not None
        gpus = range(base_gpu_id, base_gpu_id + ep_size)
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, gpus)))
    jax.config.update("jax_num_cpu_devices", ep_size or DEFAULT_CPU_DEVICES)
    if compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(compilation_cache_dir))
        # Also the small programs: a start compiles many of them.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def load(config: ServerConfig, directory: Path) -> ShardedModel:
    """The model of this directory on the devices the flags ask for."""
    model_config = ModelConfig.load(directory)
    mesh = sharding.make_mesh(config.ranks_per_node or jax.device_count())
    ranks = sharding.EpRanks(mesh.size * config.nnodes, mesh.size * config.node_rank)
    num_slots = num_expert_slots(
        model_config.n_routed_experts, ranks.ep_size, config.ep_num_redundant_experts
    )
    slots = initial_slots(config.init_expert_location, model_config, num_slots, ranks.ep_size)
    started = time.monotonic()
    dtype = resolve_dtype(config.dtype, model_config)
    quantization = resolve_quantization(config.quantization, model_config)
    model = load_model(
        directory, mesh, dtype=dtype, quantization=quantization, num_slots=num_slots, slots=slots,
        ranks=ranks,
    )  # fmt: skip
    logger.info(
        "loaded %s in %.1f s: %s%s, %d ranks of %d expert slots",
        directory.name, time.monotonic() - started, dtype,
        f" and {quantization.value} weights" if quantization else "",
        mesh.size, model.slots_per_rank,
    )  # fmt: skip
    return model


def plans_of(config: ServerConfig, model: ShardedModel) -> tuple[ExecutionPlan, ExecutionPlan]:
    """The plans of prefill and of decode that the flags ask for."""
    return make_plans(
        config.deepep_mode,
        ep_size=model.ranks.ep_size,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=config.max_dispatch_tokens_per_rank,
        moe_a2a_backend=config.a2a_backend(model.mesh.devices.flat[0].platform),
        two_batch_overlap=config.enable_two_batch_overlap,
        single_batch_overlap=config.enable_single_batch_overlap,
        tbo_decode_schedule=config.tbo_decode_schedule,
        quantization=model.quantization,
    )


def make_engine(
    model: ShardedModel,
    limits: EngineLimits,
    plans: tuple[ExecutionPlan, ExecutionPlan],
    two_batch_limits: TwoBatchLimits | None = None,
    role: Role = Role.UNIFIED,
) -> Engine:
    prefill, decode = plans
    engine = Engine(
        model, limits, prefill=prefill, decode=decode, two_batch_limits=two_batch_limits, role=role
    )
    logger.info(
        "cache: %d pages of %d tokens on each rank, %.0f MiB in all",
        limits.num_pages - 1, limits.page_size, engine.cache_bytes / 2**20,
    )  # fmt: skip
    return engine


def make_loop(
    config: ServerConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    metrics: LoopMetrics,
    model_config: ModelConfig,
    peers: Peers,
    recorder: Recorder,
    rebalancer: Rebalancer | None = None,
    fetcher: Fetcher | None = None,
) -> ServingLoop:
    """This member's loop. With several nodes their front bounds the queue, so its loops do not."""
    limits = engine.limits
    pools = [PagePool(limits.num_pages, limits.page_size) for _ in range(engine.num_ranks)]
    return ServingLoop(
        engine,
        Scheduler(
            pools,
            limits.scheduler_limits,
            prefix_cache=not config.disable_radix_cache,
            prefills=config.role is not Role.DECODE,
        ),
        lambda stop: TextStream(tokenizer, stop),
        metrics,
        peers,
        eos_token_ids=model_config.eos_token_ids,
        max_queued=config.max_queued_requests if config.nnodes == 1 else sys.maxsize,
        recorder=recorder,
        rebalancer=rebalancer,
        fetcher=fetcher,
    )


def _model_directory(config: ServerConfig) -> Path:
    directory = EMBEDDED_MODEL if config.model_path is None else Path(config.model_path)
    if not directory.is_dir():
        raise ValueError(f"--model-path must be a directory, got {config.model_path!r}")
    return directory


def _model_name(config: ServerConfig) -> str:
    return EMBEDDED_MODEL_NAME if config.model_path is None else Path(config.model_path).name


def _warm_up(engine: Engine, peers: Peers) -> None:
    started = time.monotonic()

    def progress(what: str, index: int, total: int) -> None:
        logger.info("warm-up %d/%d: %s", index + 1, total, what)

    engine.warmup(peers, progress)
    logger.info("warm-up took %.1f s", time.monotonic() - started)
