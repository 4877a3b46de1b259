"""How one role runs a model: `ExecutionPlan`. What the model is stays in `ModelConfig`."""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from custom_calls import ep
from custom_calls.grouped_gemm import row_alignment
from custom_calls.layouts import SCALE_BLOCK
from custom_calls.runtime import EpSpec
from jaxmoe.config import ModelConfig
from jaxmoe.overlap.schedule import Overlap


DTYPES = ("auto", "bfloat16", "float32")
DEEPEP_MODES = ("auto", "normal", "low_latency")
MOE_A2A_BACKENDS = tuple(ep.NORMAL)
TBO_DECODE_SCHEDULES = {
    "in_turns": Overlap.TWO_BATCH_IN_TURNS,
    "staggered": Overlap.TWO_BATCH_STAGGERED,
}
QUANTIZATIONS = ("none", "fp8")
TWO_BATCH_OVERLAP_HELP = "one half of the tokens is computed while the other half is under way"
TBO_DECODE_SCHEDULE_HELP = (
    "in which order two-batch overlap decodes: attention or experts behind exchanges, in turns; "
    "or attention alone, staggered as in SGLang"
)
SINGLE_BATCH_OVERLAP_HELP = "the shared experts are computed while tokens are under way"
QUANTIZATION_HELP = (
    "fp8: weights and activations in 128-blocks, other weights are quantised while loading; none: "
    "FP8 weights are dequantised while loading; default: what the checkpoint is"
)


class Quantization(enum.Enum):
    """How projections, MLPs and experts are multiplied; without one, in the model's dtype."""

    FP8 = "fp8"
    """DeepSeek-V3's (arXiv:2412.19437, section 3.3): see `custom_calls.layouts`."""


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
      overlap: see `Overlap`.
      unsplit_overlap: that of steps that are not cut in two.
      moe_a2a_backend: who moves tokens, a name in `custom_calls.ep`.
      fp8_dispatch: tokens are quantised before they are sent, for FP8 experts.
      grouped_gemm, permute, quantize: implementation names of the experts' custom calls, None for
        the best available.
      row_alignment: experts' rows start, and slabs end, at a multiple of it: what `grouped_gemm`
        asks for.
    """

    ep_size: int
    slots_per_rank: int
    dispatch_mode: DispatchMode
    max_dispatch_tokens_per_rank: int | None = None
    overlap: Overlap = Overlap.NONE
    unsplit_overlap: Overlap = Overlap.NONE
    moe_a2a_backend: str = "reference"
    fp8_dispatch: bool = False
    grouped_gemm: str | None = None
    permute: str | None = None
    quantize: str | None = None
    row_alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("ep_size", "slots_per_rank", "max_dispatch_tokens_per_rank", "row_alignment"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.moe_a2a_backend not in MOE_A2A_BACKENDS:
            raise ValueError(
                f"moe_a2a_backend must be one of {MOE_A2A_BACKENDS}, got {self.moe_a2a_backend!r}"
            )

    @property
    def num_physical_experts(self) -> int:
        return self.ep_size * self.slots_per_rank

    @property
    def is_two_batch(self) -> bool:
        return self.overlap.num_micro_batches > 1

    @property
    def unsplit(self) -> "ExecutionPlan":
        """The plan of steps that are not cut in two."""
        return dataclasses.replace(self, overlap=self.unsplit_overlap)

    def overlap_of(self, num_tokens: int) -> Overlap:
        """What a step of so many tokens on a rank, padding included, overlaps."""
        return (
            self.overlap if num_tokens >= self.overlap.num_micro_batches else self.unsplit_overlap
        )

    def dispatch_parts(self, num_tokens: int) -> list[slice]:
        """The tokens of each dispatch when there are so many."""
        bound = self.max_dispatch_tokens_per_rank or num_tokens
        return [
            slice(start, min(start + bound, num_tokens)) for start in range(0, num_tokens, bound)
        ]

    def expected_rows(self, num_tokens: int, top_k: int) -> int:
        """Rows an expert gets on average when every rank dispatches so many tokens."""
        return -(-num_tokens * self.ep_size * top_k // self.num_physical_experts)


def make_plans(
    deepep_mode: str,
    *,
    ep_size: int,
    slots_per_rank: int,
    max_dispatch_tokens_per_rank: int,
    moe_a2a_backend: str = "reference",
    two_batch_overlap: bool = False,
    single_batch_overlap: bool = False,
    tbo_decode_schedule: str = "in_turns",
    quantization: Quantization | None = None,
) -> tuple[ExecutionPlan, ExecutionPlan]:
    """The plans of prefill and of decode of a model with this quantisation.

    "auto" is normal dispatch in prefill and low-latency dispatch in decode; a mode's name is that
    mode in both. Two-batch overlap includes what single-batch overlap does. The token bound is
    low-latency dispatch's: its slab has room for every rank's tokens at every expert.
    """
    if deepep_mode not in DEEPEP_MODES:
        raise ValueError(f"deepep_mode must be one of {DEEPEP_MODES}, got {deepep_mode!r}")
    if tbo_decode_schedule not in TBO_DECODE_SCHEDULES:
        raise ValueError(
            f"tbo_decode_schedule must be one of {tuple(TBO_DECODE_SCHEDULES)}, got "
            f"{tbo_decode_schedule!r}"
        )
    auto = (DispatchMode.NORMAL, DispatchMode.LOW_LATENCY)
    modes = auto if deepep_mode == "auto" else 2 * (DispatchMode(deepep_mode),)
    unsplit = Overlap.SINGLE_BATCH if single_batch_overlap else Overlap.NONE
    overlaps = unsplit, unsplit
    if two_batch_overlap:
        overlaps = Overlap.TWO_BATCH_IN_TURNS, TBO_DECODE_SCHEDULES[tbo_decode_schedule]
    prefill, decode = (
        ExecutionPlan(
            ep_size=ep_size,
            slots_per_rank=slots_per_rank,
            dispatch_mode=mode,
            max_dispatch_tokens_per_rank=(
                max_dispatch_tokens_per_rank if mode is DispatchMode.LOW_LATENCY else None
            ),
            overlap=overlap,
            unsplit_overlap=unsplit,
            moe_a2a_backend=moe_a2a_backend,
            # XLA's all-to-all moves what it is given; rows of bytes only cost it conversions.
            fp8_dispatch=quantization is Quantization.FP8 and moe_a2a_backend != "reference",
            row_alignment=row_alignment(),
        )
        for mode, overlap in zip(modes, overlaps, strict=True)
    )
    return prefill, decode


def ep_spec(
    config: ModelConfig, plans: Sequence[ExecutionPlan], *, max_tokens: int, dtype: DTypeLike
) -> EpSpec:
    """What an expert-parallel group must be sized for to run these plans' steps, of at most
    `max_tokens` tokens on a rank and with activations of this dtype."""

    def most(mode: DispatchMode) -> int:
        bounds = [
            min(max_tokens, plan.max_dispatch_tokens_per_rank or max_tokens)
            for plan in plans
            if plan.dispatch_mode is mode
        ]
        return max(bounds, default=0)

    return EpSpec(
        max_ep_size=plans[0].ep_size,
        slots_per_rank=plans[0].slots_per_rank,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        normal_tokens=most(DispatchMode.NORMAL),
        low_latency_tokens=most(DispatchMode.LOW_LATENCY),
        itemsize=jnp.dtype(dtype).itemsize,
        num_micro_batches=max(plan.overlap.num_micro_batches for plan in plans),
        backend=plans[0].moe_a2a_backend,
    )


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


def resolve_quantization(name: str | None, config: ModelConfig) -> Quantization | None:
    """How a checkpoint is run when `name` is asked for; None asks for what the checkpoint is.

    "none" runs FP8 checkpoints dequantised. What cannot run in FP8 is refused by
    `check_quantization`.
    """
    if name is None:
        return None if config.weight_block_size is None else Quantization.FP8
    if name not in QUANTIZATIONS:
        raise ValueError(f"quantization must be one of {QUANTIZATIONS}, got {name!r}")
    return None if name == "none" else Quantization(name)


def check_quantization(quantization: Quantization | None, config: ModelConfig) -> None:
    """Raise ValueError unless a checkpoint of this configuration can run so."""
    if quantization is None:
        return
    block, width = config.weight_block_size, config.moe_intermediate_size
    if block not in (None, (SCALE_BLOCK, SCALE_BLOCK)):
        raise ValueError(
            f"weight_block_size must be [{SCALE_BLOCK}, {SCALE_BLOCK}] to multiply in FP8, got "
            f"{list(block)}: --quantization none dequantises the weights while loading"
        )
    if width % SCALE_BLOCK:
        raise ValueError(
            f"moe_intermediate_size must be a multiple of {SCALE_BLOCK} to multiply in FP8, so "
            f"that gate and up stacked share no block, got {width}: choose --quantization none"
        )
