"""How a server runs: `ServerConfig`, and the one place where its flags are defined.

Flags are SGLang's where it has the same thing.
"""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from jaxmoe.config import ModelConfig
from jaxmoe.eplb.recording import RecordingMode
from jaxmoe.overlap.split import DEFAULT_THRESHOLD
from jaxmoe.plan import (
    DEEPEP_MODES,
    DTYPES,
    MOE_A2A_BACKENDS,
    QUANTIZATION_HELP,
    QUANTIZATIONS,
    SINGLE_BATCH_OVERLAP_HELP,
    TBO_DECODE_SCHEDULE_HELP,
    TBO_DECODE_SCHEDULES,
    TWO_BATCH_OVERLAP_HELP,
)
from serving.connection import parse_address
from serving.engine import EngineLimits
from serving.kv_transfer import nixl
from serving.kv_transfer.backends import BACKENDS
from serving.overlap import TwoBatchLimits
from serving.rebalancer import EplbOptions
from serving.recorder import RecorderOptions
from serving.roles import Role


DEFAULT_CONTEXT_LENGTH = 8192  # of models that allow more; --context-length raises it


# What a node may have its own value of, or only node rank 0 needs.
_OF_ONE_NODE = frozenset({
    "model_path", "served_model_name", "host", "port", "node_rank", "dist_init_addr",
    "max_queued_requests", "drain_timeout", "compilation_cache_dir", "log_level",
    "init_expert_location", "expert_distribution_recorder_dir", "base_gpu_id",
})  # fmt: skip


def _flag(default: Any, text: str, **options: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **options})


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """One field a flag; every bound is for the whole server unless it says otherwise."""

    model_path: str | None = _flag(
        None, "Hugging Face or `jaxmoe convert` directory; default: the embedded model"
    )
    served_model_name: str | None = _flag(None, "name in the API; default: the directory's name")
    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(30000, "port to listen on; 0 picks a free one")
    ep_size: int | None = _flag(
        None, "expert-parallel ranks of all nodes; default: every device, 8 virtual ones on CPU"
    )
    moe_a2a_backend: str | None = _flag(
        None,
        "who moves tokens to their experts; default: reference, with several nodes loopback on "
        "CPUs and deepep on GPUs",
        choices=MOE_A2A_BACKENDS,
    )
    nnodes: int = _flag(1, "processes that serve together, each started with these flags")
    node_rank: int = _flag(0, "which of them this is; 0 has the HTTP front")
    dist_init_addr: str | None = _flag(
        None, "HOST:PORT where node rank 0 awaits the others; in a trusted network"
    )
    dtype: str = _flag(
        "auto", "of weights and activations; auto: the checkpoint's, float32 on CPU", choices=DTYPES
    )
    quantization: str | None = _flag(None, QUANTIZATION_HELP, choices=QUANTIZATIONS)
    deepep_mode: str = _flag(
        "auto",
        "dispatch: auto is normal in prefill and low_latency in decode",
        choices=DEEPEP_MODES,
    )
    enable_two_batch_overlap: bool = _flag(False, TWO_BATCH_OVERLAP_HELP)
    enable_single_batch_overlap: bool = _flag(False, SINGLE_BATCH_OVERLAP_HELP)
    tbo_decode_schedule: str = _flag(
        "in_turns", TBO_DECODE_SCHEDULE_HELP, choices=tuple(TBO_DECODE_SCHEDULES)
    )
    tbo_token_distribution_threshold: float = _flag(
        DEFAULT_THRESHOLD,
        "share of a prefill's tokens below which no half of a two-batch overlap falls: a sequence "
        "is cut rather",
    )
    tbo_min_prefill_tokens: int | None = _flag(
        None,
        "tokens of a rank's prefill from which on it is overlapped in two batches; default: "
        "measured at start-up",
    )
    tbo_min_decode_requests: int | None = _flag(
        None, "the same of a rank's decoding requests; default: measured at start-up"
    )
    max_dispatch_tokens_per_rank: int = _flag(
        128, "tokens a rank sends in one low-latency dispatch; larger batches are split"
    )
    ep_num_redundant_experts: int | None = _flag(
        None, "expert slots beyond the experts; default: what makes them divide over the ranks"
    )
    enable_eplb: bool = _flag(
        False, "move experts while serving, so that ranks get equally many tokens"
    )
    eplb_rebalance_num_iterations: int = _flag(
        1000, "steps whose tokens are counted before experts are moved"
    )
    eplb_rebalance_layers_per_chunk: int | None = _flag(
        None, "layers switched to their new experts at a time; default: all"
    )
    eplb_min_rebalancing_utilization_threshold: float = _flag(
        1.0, "mean over max of ranks' tokens from which on experts stay where they are"
    )
    init_expert_location: str = _flag(
        "trivial",
        "which expert each slot holds at first: trivial, expert p modulo experts in slot p, or a "
        "file, a plan or a recording to plan by",
    )
    expert_distribution_recorder_mode: str = _flag(
        "stat",
        "what the recorder keeps: stat adds all steps up, per_pass and per_token do not",
        choices=tuple(mode.value for mode in RecordingMode),
    )
    expert_distribution_recorder_buffer_size: int = _flag(
        1000, "steps that per_pass and per_token keep, the last ones; -1 for all"
    )
    expert_distribution_recorder_dir: str = _flag(".", "where a node writes what it recorded")
    context_length: int | None = _flag(
        None, "longest sequence, prompt and output; default: the model's, at most 8192"
    )
    max_running_requests: int = _flag(64, "requests that run at a time")
    max_queued_requests: int = _flag(1024, "requests that wait; more get 503")
    max_total_tokens: int | None = _flag(
        None, "tokens the cache holds; default: a quarter of running requests at full length"
    )
    chunked_prefill_size: int = _flag(256, "tokens a rank prefills in one step")
    page_size: int = _flag(64, "tokens of a cache page")
    disable_radix_cache: bool = _flag(
        False, "compute every prompt anew, whatever earlier ones it starts like"
    )
    disaggregation_mode: str = _flag(
        Role.UNIFIED.value,
        "null: serve requests whole; prefill: compute prompts for decode workers; decode: have "
        "them computed",
        choices=tuple(role.value for role in Role),
    )
    disaggregation_bootstrap_port: int = _flag(
        8998, "port where a prefill worker awaits decode workers; 0 picks a free one"
    )
    disaggregation_transfer_backend: str = _flag(
        "socket",
        "how caches get from prefill to decode workers: socket, jax "
        "(jax.experimental.transfer), or nixl (an extra)",
        choices=BACKENDS,
    )
    disaggregation_timeout: float = _flag(
        300.0, "seconds after which a prompt that has not come from its prefill worker is given up"
    )
    disaggregation_checksums: bool = _flag(False, "send checksums with the caches and check them")
    router: str | None = _flag(
        None, "URL of a `jaxmoe router` that a prefill or decode worker registers with"
    )
    pd: str | None = _flag(
        None,
        "PxD: a router at --port and so many prefill and decode workers on this machine, each "
        "with these flags",
    )
    prefill_args: str = _flag("", "with --pd, flags of prefill workers alone")
    decode_args: str = _flag("", "with --pd, flags of decode workers alone")
    base_gpu_id: int | None = _flag(
        None, "first GPU of this process, which has --ep-size of them; default: all are its own"
    )
    drain_timeout: float = _flag(10.0, "seconds running requests may finish in at shutdown")
    compilation_cache_dir: str | None = _flag(
        str(Path("~/.cache/jaxmoe/xla")), "where compiled programs are kept; '' keeps none"
    )
    log_level: str = _flag(
        "info", "of the server's log", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "chunked_prefill_size", "page_size",
                     "max_dispatch_tokens_per_rank", "ep_size", "context_length",
                     "max_total_tokens", "nnodes", "tbo_min_prefill_tokens",
                     "tbo_min_decode_requests", "eplb_rebalance_num_iterations",
                     "eplb_rebalance_layers_per_chunk"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        for name in ("max_queued_requests", "drain_timeout", "ep_num_redundant_experts"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, got {value}")
        size = self.expert_distribution_recorder_buffer_size
        if size < 1 and size != -1:
            raise ValueError(
                f"--expert-distribution-recorder-buffer-size must be at least 1, or -1, got {size}"
            )
        for name in ("port", "disaggregation_bootstrap_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise ValueError(
                    f"--{name.replace('_', '-')} must be between 0 and 65535, got {value}"
                )
        self._check_disaggregation()
        self._check_pd()
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node-rank must be between 0 and {self.nnodes - 1} with --nnodes {self.nnodes}, "
                f"got {self.node_rank}"
            )
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError(f"--nnodes ({self.nnodes}) above 1 needs --dist-init-addr, got none")
        if self.nnodes > 1 and self.moe_a2a_backend == "reference":
            raise ValueError(
                f"--moe-a2a-backend reference moves tokens within one process, --nnodes is "
                f"{self.nnodes}: choose loopback on CPUs, deepep on GPUs"
            )
        if not 0 <= self.tbo_token_distribution_threshold <= 0.5:
            raise ValueError(
                f"--tbo-token-distribution-threshold must be between 0 and 0.5, got "
                f"{self.tbo_token_distribution_threshold}"
            )
        if not 0 < self.eplb_min_rebalancing_utilization_threshold <= 1:
            raise ValueError(
                f"--eplb-min-rebalancing-utilization-threshold must be above 0 and at most 1, got "
                f"{self.eplb_min_rebalancing_utilization_threshold}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("eplb_") and value != field.default and not self.enable_eplb:
                raise ValueError(
                    f"--{field.name.replace('_', '-')} ({value}) needs --enable-eplb, which is not "
                    "given"
                )
        for name in ("tbo_min_prefill_tokens", "tbo_min_decode_requests"):
            if getattr(self, name) is not None and not self.enable_two_batch_overlap:
                raise ValueError(
                    f"--{name.replace('_', '-')} ({getattr(self, name)}) needs "
                    "--enable-two-batch-overlap, which is not given"
                )
        if self.ep_size is not None and self.ep_size % self.nnodes:
            raise ValueError(
                f"--ep-size ({self.ep_size}) must be divisible by --nnodes ({self.nnodes})"
            )
        if self.dist_init_addr is not None:
            if self.nnodes == 1:
                raise ValueError(
                    f"--dist-init-addr is for --nnodes above 1, got {self.dist_init_addr}"
                )
            try:
                parse_address(self.dist_init_addr)
            except ValueError as error:
                raise ValueError(f"--dist-init-addr {error}") from None

    def _check_disaggregation(self) -> None:
        if self.disaggregation_timeout <= 0:
            raise ValueError(
                f"--disaggregation-timeout must be above 0, got {self.disaggregation_timeout}"
            )
        if self.disaggregation_transfer_backend == "nixl":
            nixl.check_installed()
        if self.role is not Role.UNIFIED:
            if self.nnodes > 1:
                raise ValueError(
                    f"--disaggregation-mode {self.disaggregation_mode} is for workers of one "
                    f"process, --nnodes is {self.nnodes}"
                )
        elif self.router is not None:
            raise ValueError(
                f"--router ({self.router}) is for workers with --disaggregation-mode prefill or "
                "decode"
            )
        if self.router is not None and not re.fullmatch(r"http://[^/\s]+/?", self.router):
            raise ValueError(f"--router must be http://HOST:PORT, got {self.router}")

    def _check_pd(self) -> None:
        if self.base_gpu_id is not None and (self.base_gpu_id < 0 or self.ep_size is None):
            raise ValueError(
                f"--base-gpu-id must not be negative and needs --ep-size, got {self.base_gpu_id} "
                f"with --ep-size {self.ep_size}"
            )
        if self.pd is None:
            if self.prefill_args or self.decode_args:
                raise ValueError(
                    "--prefill-args and --decode-args are for --pd, which is not given"
                )
            return
        if not re.fullmatch(r"[1-9][0-9]?x[1-9][0-9]?", self.pd):
            raise ValueError(f"--pd must be PxD, both between 1 and 99, got {self.pd}")
        if self.role is not Role.UNIFIED or self.router is not None or self.nnodes > 1:
            raise ValueError(
                f"--pd ({self.pd}) starts workers of both roles and their router itself: it goes "
                "with none of --disaggregation-mode, --router and --nnodes"
            )

    @property
    def pd_workers(self) -> dict[Role, int]:
        """How many of each role `pd` asks for."""
        assert self.pd is not None
        prefill, decode = map(int, self.pd.split("x"))
        return {Role.PREFILL: prefill, Role.DECODE: decode}

    @property
    def role(self) -> Role:
        return Role(self.disaggregation_mode)

    @property
    def ranks_per_node(self) -> int | None:
        """None: every device of a node."""
        return None if self.ep_size is None else self.ep_size // self.nnodes

    @property
    def two_batch_limits(self) -> TwoBatchLimits:
        return TwoBatchLimits(
            self.tbo_min_prefill_tokens,
            self.tbo_min_decode_requests,
            self.tbo_token_distribution_threshold,
        )

    @property
    def eplb_options(self) -> EplbOptions:
        return EplbOptions(
            self.eplb_rebalance_num_iterations,
            self.eplb_rebalance_layers_per_chunk,
            self.eplb_min_rebalancing_utilization_threshold,
        )

    @property
    def recorder_options(self) -> RecorderOptions:
        size = self.expert_distribution_recorder_buffer_size
        return RecorderOptions(
            RecordingMode(self.expert_distribution_recorder_mode),
            None if size == -1 else size,
            Path(self.expert_distribution_recorder_dir),
            self.node_rank,
            self.nnodes,
        )

    def a2a_backend(self, platform: str) -> str:
        """`moe_a2a_backend`, or what such devices need where none is asked for."""
        if self.moe_a2a_backend is not None:
            return self.moe_a2a_backend
        if self.nnodes == 1:
            return "reference"
        return "deepep" if platform == "gpu" else "loopback"

    @property
    def dist_init_address(self) -> tuple[str, int]:
        """Host and port of `dist_init_addr`, which must be set."""
        assert self.dist_init_addr is not None, "there is one node"
        return parse_address(self.dist_init_addr)

    @property
    def fingerprint(self) -> dict[str, str]:
        """The flags that must be equal on all nodes, as text.

        Where a node finds its files and how it logs is its own affair.
        """
        values = {f"--{f.name.replace('_', '-')}": f for f in dataclasses.fields(self)}
        return {
            flag: str(getattr(self, field.name))
            for flag, field in values.items()
            if field.name not in _OF_ONE_NODE
        }

    def engine_limits(self, model: ModelConfig, num_ranks: int) -> EngineLimits:
        """The sizes of each rank's engine; `num_ranks` counts those of all nodes.

        Raises ValueError when they cannot hold one sequence.
        """
        most = model.max_position_embeddings
        context = self.context_length or min(most, DEFAULT_CONTEXT_LENGTH)
        if context > most:
            raise ValueError(
                f"--context-length ({context}) must not exceed the model's "
                f"max_position_embeddings ({most})"
            )
        running = -(-self.max_running_requests // num_ranks)
        if self.max_total_tokens is None:
            pages = -(-max(context, running * context // 4) // self.page_size)
        else:
            pages = self.max_total_tokens // num_ranks // self.page_size
        if pages * self.page_size < context:
            raise ValueError(
                f"each rank's cache holds {pages * self.page_size} tokens in whole pages and must "
                f"hold one sequence of context_length ({context}): raise --max-total-tokens to at "
                f"least {-(-context // self.page_size) * self.page_size * num_ranks}"
            )
        return EngineLimits(
            max_running=running,
            chunk_tokens=self.chunked_prefill_size,
            context_length=context,
            page_size=self.page_size,
            num_pages=pages + 1,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each field of `ServerConfig`."""
    types = {"int": int, "float": float, "str": str}
    for field in dataclasses.fields(ServerConfig):
        options = dict(field.metadata)
        kind = str(field.type).split(" | ")[0].removeprefix("<class '").removesuffix("'>")
        flag = f"--{field.name.replace('_', '-')}"
        if kind == "bool":
            parser.add_argument(flag, action="store_true", **options)
        else:
            parser.add_argument(flag, type=types[kind], default=field.default, **options)


def from_arguments(args: argparse.Namespace) -> ServerConfig:
    return ServerConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(ServerConfig)})


def arguments_of(config: ServerConfig) -> list[str]:
    """The flags that make this configuration."""
    arguments = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), f"--{field.name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value != field.default:
            arguments.append(f"{flag}={value}")
    return arguments
