"""`jaxmoe compare`: the same prompts through transformers' DeepSeek and ours, layer by layer.

The reference decodes greedily; ours is fed the reference's tokens, so that every step compares the
same input. Hidden states are compared over all positions, prefill's and decode's.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from custom_calls import runtime
from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.config import ModelConfig
from jaxmoe.plan import (
    DEEPEP_MODES,
    MOE_A2A_BACKENDS,
    QUANTIZATION_HELP,
    QUANTIZATIONS,
    SINGLE_BATCH_OVERLAP_HELP,
    TWO_BATCH_OVERLAP_HELP,
    Quantization,
    check_quantization,
    make_plans,
    resolve_quantization,
)
from jaxmoe.reference.torch_deepseek import (
    ReferenceUnavailableError,
    load_reference,
    trace_reference,
)
from jaxmoe.reference.trace import Trace
from jaxmoe.reference.trace_jax import ROW_MULTIPLE, trace_model
from jaxmoe.step import ShardedModel, Steps, join_ep_group
from jaxmoe.tokenizer import Tokenizer


DEFAULT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.2, "fp8": 0.25}
"""Of `Comparison.difference`, by `Comparison.arithmetic`.

float32 differs by the order of summation only, so every logit is held to the bound. In bfloat16 a
router whose best choices are within rounding sends a token to another expert, and that token's
logits move by more than one: the bound is on the relative difference of all logits together. On the
random configurations it is 0.01 to 0.14 between PyTorch and ours, as it is between PyTorch in
bfloat16 and in float32. Swapped experts give 0.5 to 0.8, a dropped norm or correction bias 0.2 to
0.4: bfloat16 finds gross errors only, so look for small ones in float32.

FP8 is bounded in the same way whatever the dtype beside it. Both sides have the same weights and
ours rounds activations too: 0.14 to 0.18 on "fp8-small", 0.03 on the embedded model. Swapped
experts give 0.8, wrong scales 0.4.
"""
DEFAULT_PROMPT_LENGTHS = (1, 7, 16, 33, 64, 130, 200)
DEFAULT_CPU_DEVICES = 8
DEFAULT_MAX_DISPATCH_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """One decoder layer over all positions of all prompts.

    Attributes:
      max_abs: largest difference of a hidden state's element.
      relative: norm of the difference over norm of the reference.
      router_agreement: share of tokens that went to the same set of experts; None without router.
    """

    layer: int
    max_abs: float
    relative: float
    router_agreement: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      prefill_logits: largest difference of the logits of any prompt token.
      decode_logits: the same for each decode step.
      relative_logits: norm of the difference of all logits over norm of the reference.
      token_agreement: share of greedy tokens that are equal.
      first_token_difference: (prompt, index of the generated token), None when all are equal.
    """

    dtype: str
    quantization: str | None
    ep_size: int
    deepep_mode: str
    chunk_size: int | None
    prompt_lengths: tuple[int, ...]
    max_new_tokens: int
    layers: tuple[LayerDifference, ...]
    prefill_logits: float
    decode_logits: tuple[float, ...]
    relative_logits: float
    token_agreement: float
    first_token_difference: tuple[int, int] | None

    @property
    def max_logits(self) -> float:
        """The largest difference of any logit; NaN if any is."""
        return float(np.max([self.prefill_logits, *self.decode_logits]))

    @property
    def arithmetic(self) -> str:
        """What products are in, a key of `DEFAULT_TOLERANCE`."""
        return self.quantization or self.dtype

    @property
    def difference(self) -> float:
        """What the tolerance bounds: the largest difference of any logit in float32, the relative
        difference of all logits in bfloat16 and FP8."""
        return self.max_logits if self.arithmetic == "float32" else self.relative_logits

    def passed(self, tolerance: float) -> bool:
        """`difference` is within the tolerance, and in float32 all greedy tokens are equal.

        bfloat16 and FP8 may decide between near-equal tokens either way; their agreement is
        reported only.
        """
        tokens_pass = self.arithmetic != "float32" or self.first_token_difference is None
        return self.difference <= tolerance and tokens_pass

    def to_json(self) -> str:
        derived = {"max_logits": self.max_logits, "difference": self.difference}
        return json.dumps(dataclasses.asdict(self) | derived)

    def format_table(self) -> str:
        chunks = f"chunks of {self.chunk_size}" if self.chunk_size else "whole prompts"
        fp8 = f"{self.quantization}, " if self.quantization else ""
        lines = [
            f"{fp8}{self.dtype}, {self.ep_size} ranks, {self.deepep_mode} dispatch, {chunks}, "
            f"prompts of {', '.join(map(str, self.prompt_lengths))} tokens",
            "",
            f"{'layer':>5}  {'max |diff|':>10}  {'relative':>10}  {'same experts':>12}",
        ]
        for layer in self.layers:
            agreement = "-" if layer.router_agreement is None else f"{layer.router_agreement:.2%}"
            lines.append(
                f"{layer.layer:>5}  {layer.max_abs:>10.2e}  {layer.relative:>10.2e}  "
                f"{agreement:>12}"
            )
        lines += ["", f"logits, prefill:  max |diff| {self.prefill_logits:.2e}"]
        if self.decode_logits:
            lines.append(
                f"logits, decode:   max |diff| {np.max(self.decode_logits):.2e} over "
                f"{len(self.decode_logits)} steps"
            )
        lines.append(f"logits, all:      relative {self.relative_logits:.2e}")
        lines.append(f"greedy tokens:    {self.token_agreement:.2%} equal")
        if self.first_token_difference is not None:
            prompt, index = self.first_token_difference
            lines.append(f"first difference: prompt {prompt}, generated token {index}")
        return "\n".join(lines)


def compare(
    model_dir: Path | str,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    ep_size: int,
    deepep_mode: str = "auto",
    moe_a2a_backend: str = "reference",
    two_batch_overlap: bool = False,
    single_batch_overlap: bool = False,
    dtype: DTypeLike = jnp.float32,
    quantization: Quantization | None = None,
    chunk_size: int | None = None,
    num_slots: int | None = None,
    max_dispatch_tokens_per_rank: int = DEFAULT_MAX_DISPATCH_TOKENS,
) -> Comparison:
    """Load the model in both implementations and compare them on these prompts.

    With a `quantization` both have the same weights, the reference's dequantised; its activations
    are not quantised.
    """
    config = ModelConfig.load(model_dir)
    check_prompts(config, prompts, max_new_tokens)
    check_quantization(quantization, config)
    reference = load_reference(model_dir, dtype=dtype, quantization=quantization)
    expected = trace_reference(reference, prompts, max_new_tokens=max_new_tokens)
    model = load_model(
        model_dir,
        sharding.make_mesh(ep_size),
        dtype=dtype,
        quantization=quantization,
        num_slots=num_slots,
    )
    return compare_model(
        model,
        expected,
        deepep_mode=deepep_mode,
        moe_a2a_backend=moe_a2a_backend,
        two_batch_overlap=two_batch_overlap,
        single_batch_overlap=single_batch_overlap,
        chunk_size=chunk_size,
        max_dispatch_tokens_per_rank=max_dispatch_tokens_per_rank,
    )


def compare_model(
    model: ShardedModel,
    expected: Sequence[Trace],
    *,
    deepep_mode: str = "auto",
    moe_a2a_backend: str = "reference",
    two_batch_overlap: bool = False,
    single_batch_overlap: bool = False,
    chunk_size: int | None = None,
    max_dispatch_tokens_per_rank: int = DEFAULT_MAX_DISPATCH_TOKENS,
) -> Comparison:
    """Compare a loaded model with traces of the reference."""
    prefill, decode = make_plans(
        deepep_mode,
        ep_size=model.ranks.ep_size,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=max_dispatch_tokens_per_rank,
        moe_a2a_backend=moe_a2a_backend,
        two_batch_overlap=two_batch_overlap,
        single_batch_overlap=single_batch_overlap,
        quantization=model.quantization,
    )
    lengths = [trace.num_prompt_tokens for trace in expected]
    # One step has at most all prompts.
    join_ep_group(model, (prefill, decode), max_tokens=sum(lengths) + ROW_MULTIPLE)
    try:
        found = trace_model(
            model,
            Steps(model, prefill=prefill, decode=decode),
            [trace.fed for trace in expected],
            lengths,
            chunk_size=chunk_size,
        )
    finally:
        runtime.shutdown()
    config = model.config
    return Comparison(
        dtype=jnp.dtype(model.dtype).name,
        quantization=None if model.quantization is None else model.quantization.value,
        ep_size=model.ranks.ep_size,
        deepep_mode=deepep_mode,
        chunk_size=chunk_size,
        prompt_lengths=tuple(trace.num_prompt_tokens for trace in expected),
        max_new_tokens=max(len(trace.tokens) for trace in expected),
        layers=compare_layers(found, expected, config.first_k_dense_replace),
        **_compare_outputs(found, expected),
    )


def compare_layers(
    found: Sequence[Trace], expected: Sequence[Trace], num_dense_layers: int
) -> tuple[LayerDifference, ...]:
    """Hidden states and routing of each layer."""
    differences = []
    for layer in range(len(expected[0].hidden)):
        ours, theirs = (
            np.concatenate([trace.hidden[layer] for trace in traces])
            for traces in (found, expected)
        )
        agreement = None
        if (moe_layer := layer - num_dense_layers) >= 0:
            ours_idx, theirs_idx = (
                np.sort(np.concatenate([trace.topk_idx[moe_layer] for trace in traces]), axis=-1)
                for traces in (found, expected)
            )
            agreement = float((ours_idx == theirs_idx).all(-1).mean())
        differences.append(
            LayerDifference(
                layer=layer,
                max_abs=float(np.abs(ours - theirs).max()),
                relative=_relative(ours, theirs),
                router_agreement=agreement,
            )
        )
    return tuple(differences)


def _compare_outputs(found: Sequence[Trace], expected: Sequence[Trace]) -> dict[str, Any]:
    num_steps = max(len(trace.tokens) for trace in expected)
    prefill: list[float] = []
    decode: list[list[float]] = [[] for _ in range(num_steps - 1)]
    num_equal = num_tokens = 0
    first_difference = None
    for prompt, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        rows = np.abs(ours.logits - theirs.logits).max(-1)
        prefill.append(rows[: theirs.num_prompt_tokens].max())
        for step, difference in enumerate(rows[theirs.num_prompt_tokens :]):
            decode[step].append(difference)
        is_equal = ours.tokens == theirs.tokens
        num_equal += int(is_equal.sum())
        num_tokens += is_equal.size
        if first_difference is None and not is_equal.all():
            first_difference = (prompt, int(np.argmin(is_equal)))
    return dict(
        prefill_logits=float(np.max(prefill)),
        decode_logits=tuple(float(np.max(step)) for step in decode),
        relative_logits=_relative(
            *(np.concatenate([trace.logits for trace in traces]) for traces in (found, expected))
        ),
        token_agreement=num_equal / num_tokens,
        first_token_difference=first_difference,
    )


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check_prompts(
    config: ModelConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Raise ValueError for prompts that neither model can run."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be positive, got {max_new_tokens}")
    if not prompts or not all(prompts):
        raise ValueError("there must be at least one prompt, and none without tokens")
    for index, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > config.max_position_embeddings:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens: with {max_new_tokens} new ones that is "
                f"more than max_position_embeddings ({config.max_position_embeddings})"
            )
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise ValueError(f"prompt {index} has a token outside [0, {config.vocab_size})")


def random_prompts(
    config: ModelConfig, lengths: Sequence[int], *, seed: int = 0
) -> list[list[int]]:
    """A prompt of random tokens of each length."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, config.vocab_size, length).tolist() for length in lengths]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxmoe compare`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model-path", metavar="M", help="a Hugging Face directory")
    source.add_argument(
        "--random-config", choices=sorted(RANDOM_CONFIGS), help="a seeded random model"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="may be repeated; by default random tokens, 1 to 200 of them",
    )
    parser.add_argument("--max-new-tokens", type=int, default=8, metavar="N")
    parser.add_argument(
        "--ep-size", type=int, metavar="N", help="ranks; all devices by default, 8 on a CPU"
    )
    parser.add_argument("--deepep-mode", choices=DEEPEP_MODES, default="auto")
    parser.add_argument("--moe-a2a-backend", choices=MOE_A2A_BACKENDS, default="reference")
    parser.add_argument(
        "--enable-two-batch-overlap", action="store_true", help=TWO_BATCH_OVERLAP_HELP
    )
    parser.add_argument(
        "--enable-single-batch-overlap", action="store_true", help=SINGLE_BATCH_OVERLAP_HELP
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help=f"{QUANTIZATION_HELP}; the reference has the same weights, dequantised",
    )
    parser.add_argument(
        "--chunk-size", type=int, metavar="N", help="prompt tokens per prefill step; all by default"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="of the largest difference of a logit in float32 (default "
        f"{DEFAULT_TOLERANCE['float32']}), of the relative difference of all logits in bfloat16 "
        f"(default {DEFAULT_TOLERANCE['bfloat16']}) and FP8 (default {DEFAULT_TOLERANCE['fp8']})",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """0 within the tolerance, 1 past it, 2 when there is nothing to compare with."""
    if args.chunk_size is not None and args.chunk_size < 1:
        raise ValueError(f"--chunk-size must be positive, got {args.chunk_size}")
    # Another caller in this process may have started JAX already; the mesh checks what it needs.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", args.ep_size or DEFAULT_CPU_DEVICES)
    with _model_directory(args) as model_dir:
        config = ModelConfig.load(model_dir)
        if args.prompt:
            tokenizer = Tokenizer.load(model_dir)
            prompts = [tokenizer.encode(text) for text in args.prompt]
        else:
            longest = config.max_position_embeddings - args.max_new_tokens
            lengths = [length for length in DEFAULT_PROMPT_LENGTHS if length <= longest]
            prompts = random_prompts(config, lengths)
        try:
            comparison = compare(
                model_dir,
                prompts,
                max_new_tokens=args.max_new_tokens,
                ep_size=args.ep_size or jax.device_count(),
                deepep_mode=args.deepep_mode,
                moe_a2a_backend=args.moe_a2a_backend,
                two_batch_overlap=args.enable_two_batch_overlap,
                single_batch_overlap=args.enable_single_batch_overlap,
                dtype=jnp.dtype(args.dtype),
                quantization=resolve_quantization(args.quantization, config),
                chunk_size=args.chunk_size,
            )
        except ReferenceUnavailableError as error:
            print(f"jaxmoe compare: {error}", file=sys.stderr)
            return 2
    default = DEFAULT_TOLERANCE[comparison.arithmetic]
    tolerance = default if args.tolerance is None else args.tolerance
    passed = comparison.passed(tolerance)
    if args.json:
        verdict = {"tolerance": tolerance, "passed": passed}
        print(json.dumps(json.loads(comparison.to_json()) | verdict))
    else:
        print(comparison.format_table())
        print(f"{'within' if passed else 'PAST'} the tolerance of {tolerance:g}")
    return 0 if passed else 1


@contextlib.contextmanager
def _model_directory(args: argparse.Namespace) -> Iterator[Path]:
    if args.model_path is not None:
        yield Path(args.model_path)
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield write_random_checkpoint(
            Path(scratch) / args.random_config,
            RANDOM_CONFIGS[args.random_config],
            seed=0,
            dtype=args.dtype,
        )
