"""How one role runs a model: `ExecutionPlan`. What the model is stays in `ModelConfig`."""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from jaxmoe.config import ModelConfig


DTYPES = ("auto", "bfloat16", "float32")
DEEPEP_MODES = ("auto", "normal", "low_latency")


class DispatchMode(enum.Enum):
    """DeepEP's two ways to move tokens to their experts."""

    NORMAL = "normal"
    """Exact counts, contiguous layout: for many tokens (prefill)."""
    LOW_LATENCY = "low_latency"
    """A fixed slab per expert, masked layout: for few tokens (decode)."""


@dataclasses.dataclass(frozen=True)
class ExecutionPlan:
    """Frozen and hashable: a jitted step is compiled for one plan.

    Attributes:
      ep_size: ranks of the expert-parallel mesh; attention is data-parallel over the same ranks.
      slots_per_rank: physical experts each rank holds.
      dispatch_mode: see `DispatchMode`.
      max_dispatch_tokens_per_rank: tokens one dispatch moves at most from a rank; the MoE layer
        splits a larger batch into several dispatches. None: any number.
      grouped_gemm, permute: implementation names of the custom calls, None for the best available.
    """

    ep_size: int
    slots_per_rank: int
    dispatch_mode: DispatchMode
    max_dispatch_tokens_per_rank: int | None = None
    grouped_gemm: str | None = None
    permute: str | None = None

    def __post_init__(self) -> None:
        for name in ("ep_size", "slots_per_rank", "max_dispatch_tokens_per_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    @property
    def num_physical_experts(self) -> int:
        return self.ep_size * self.slots_per_rank


def make_plans(
    deepep_mode: str,
    *,
    ep_size: int,
    slots_per_rank: int,
    max_dispatch_tokens_per_rank: int,
) -> tuple[ExecutionPlan, ExecutionPlan]:
    """The plans of prefill and of decode.

    "auto" is normal dispatch in prefill and low-latency dispatch in decode; a mode's name is that
    mode in both. The token bound is low-latency dispatch's: its slab has room for every rank's
    tokens at every expert.
    """
    if deepep_mode not in DEEPEP_MODES:
        raise ValueError(f"deepep_mode must be one of {DEEPEP_MODES}, got {deepep_mode!r}")
    auto = (DispatchMode.NORMAL, DispatchMode.LOW_LATENCY)
    modes = auto if deepep_mode == "auto" else 2 * (DispatchMode(deepep_mode),)
    prefill, decode = (
        ExecutionPlan(
            ep_size=ep_size,
            slots_per_rank=slots_per_rank,
            dispatch_mode=mode,
            max_dispatch_tokens_per_rank=(
                max_dispatch_tokens_per_rank if mode is DispatchMode.LOW_LATENCY else None
            ),
        )
        for mode in modes
    )
    return prefill, decode


def resolve_dtype(name: str, config: ModelConfig) -> jnp.dtype:
    """The dtype weights and activations have when `name` is asked for.

    "auto" is the checkpoint's own, except on CPU, where XLA computes bfloat16 by converting and
    float32 is both faster and closer.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {name!r}")
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else config.torch_dtype
    if name not in DTYPES:
        raise ValueError(
            f"the checkpoint's torch_dtype is {name!r}: choose one of {DTYPES[1:]} with --dtype"
        )
    return jnp.dtype(name)
