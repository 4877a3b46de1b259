"""Whole forward passes of a random model as wide as DeepSeek-V3 on one GPU, in FP8 or bf16.

    python benchmarks/forward.py --output forward.json

The weights are drawn on the device, `--layers` decoder layers of which the first is dense. A
prefill step takes `--requests` prompts of `--prompt` tokens; a decode step adds a token to each of
`--batch` requests with a context of as many. Times are medians of steps one after the other, each
waiting for the last. Then two small steps are compared with the same steps by the plain-JAX
implementations of the experts, permutation and quantisation, and with each other: decoding a token
and prefilling it must agree. Compilations are counted while timing.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import report
from custom_calls import deep_gemm
from jaxmoe import batch, kv_cache, sharding
from jaxmoe.batch import Batch
from jaxmoe.compilations import CompilationCounter
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.placement import trivial_placement
from jaxmoe.plan import ExecutionPlan, Quantization, make_plans, resolve_quantization
from jaxmoe.step import ShardedModel, Steps, abstract_model, path_names


PAGE_SIZE = 64
CHECKED_TOKENS = 24  # of each of the prompts that are compared
PLAIN = dict(grouped_gemm="reference", permute="reference", quantize="reference", row_alignment=1)
LARGEST_FP8 = 448.0
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""What DeepSeek-V3's config.json says, without the number of layers."""
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    changes = TINY if args.dry_run else {}
    config = ModelConfig.from_hf(V3 | changes | {"num_hidden_layers": args.layers})
    model = random_model(config, resolve_quantization(args.quantization, config))
    document: dict[str, Any] = {
        "benchmark": "forward",
        "layers": args.layers,
        "quantization": args.quantization,
        "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **report.origin(args.commit),
    }
    plans = make_plans(
        "auto",
        ep_size=1,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=max(args.batch, 128),
    )
    prefill, decode = plans
    steps = Steps(model, prefill=prefill, decode=decode)
    prompts = prefill_batch(args.requests, args.prompt)
    document["prefill"] = measure(model, steps, prompts, args.requests * args.prompt, args)
    tokens = decode_batch(args.batch, args.prompt)
    document["decode"] = measure(model, steps, tokens, args.batch, args)
    report.write(args.output, report.rounded(document))  # the comparison needs more memory
    document |= check(model, plans)
    report.write(args.output, report.rounded(document))
    print(json.dumps(report.rounded(document), indent=1))
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--layers", type=int, default=4, metavar="N", help="decoder layers (%(default)s)")
    add("--quantization", choices=("fp8", "none"), default="fp8", help="(%(default)s)")
    add("--requests", type=int, default=4, metavar="N", help="of a prefill step (%(default)s)")
    add("--prompt", type=int, default=1024, metavar="T", help="tokens of each (%(default)s)")
    add("--batch", type=int, default=128, metavar="B", help="of a decode step (%(default)s)")
    add("--repeats", type=int, default=20, metavar="N", help="timed steps (%(default)s)")
    add("--output", type=Path, metavar="FILE", help="write the results as JSON")
    add("--commit", metavar="ID", help="where git has none")
    add("--dry-run", action="store_true", help="a small model, on any platform")
    return parser.parse_args(argv)


# The model


def random_model(config: ModelConfig, quantization: Quantization | None) -> ShardedModel:
    """Activations stay near one through the layers; a parameter depends on its name alone."""
    num_slots = config.n_routed_experts
    graphdef, params = abstract_model(config, num_slots, jnp.bfloat16, quantization)
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    shapes = {path_names(path): leaf.shape for path, leaf in paths}
    leaves = [random_parameter(path_names(path), leaf, shapes) for path, leaf in paths]
    return ShardedModel(
        config=config,
        mesh=sharding.make_mesh(1),
        dtype=jnp.bfloat16,
        graphdef=graphdef,
        params=jax.tree_util.tree_unflatten(structure, jax.block_until_ready(leaves)),
        placement=trivial_placement(config.num_moe_layers, num_slots, num_slots),
        ranks=sharding.EpRanks(1),
        quantization=quantization,
    )


def random_parameter(
    names: tuple[str | int, ...], leaf: jax.ShapeDtypeStruct, shapes: dict[Any, tuple[int, ...]]
) -> jax.Array:
    name = ".".join(map(str, names))
    key = jax.random.key(zlib.crc32(name.encode()))
    if name.endswith("scale_inv"):
        weight = shapes[*names[:-1], str(names[-1]).removesuffix("_scale_inv")]
        # Values are 64 times a normal number.
        uniform = jax.random.uniform(key, leaf.shape, minval=0.5, maxval=1.5)
        return uniform * weight[-1] ** -0.5 / 64
    if "norm" in name:
        spread, mean = 0.1, 1.0
    elif name.endswith("bias"):
        spread, mean = 0.05, 0.0
    elif "embed_tokens" in name:
        spread, mean = 1.0, 0.0
    else:
        spread, mean = leaf.shape[-1] ** -0.5 * (2.0 if "mlp.gate." in name else 1.0), 0.0
    if leaf.dtype == jnp.float8_e4m3fn:
        spread = 64.0
    return draw(key, leaf.shape, jnp.dtype(leaf.dtype), mean, spread)


@partial(jax.jit, static_argnums=(1, 2))
def draw(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, spread: float
) -> jax.Array:
    def matrix(key: jax.Array) -> jax.Array:
        values = mean + spread * jax.random.normal(key, shape[-2:], jnp.float32)
        if dtype == jnp.float8_e4m3fn:
            values = jnp.clip(values, -LARGEST_FP8, LARGEST_FP8)
        return values.astype(dtype)

    if len(shape) < 3:
        return matrix(key)
    # One at a time: the experts of a layer have more numbers than fit in memory as float32.
    return jax.lax.map(matrix, jax.random.split(key, shape[0]))


# The steps


def pages_of(request: int, num_tokens: int) -> np.ndarray:
    """Its pages when all requests have as many tokens; page 0 is nobody's."""
    each = -(-num_tokens // PAGE_SIZE)
    return 1 + request * each + np.arange(each, dtype=np.int32)


def slots_of(request: int, positions: np.ndarray, room: int) -> np.ndarray:
    return pages_of(request, room)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE


def token_ids(requests: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 500, (requests, num_tokens), np.int32)


def prefill_batch(requests: int, num_tokens: int, room: int | None = None) -> batch.PrefillBatch:
    """Whole prompts. `room` is how many tokens of each the cache has pages for."""
    room = room or num_tokens
    pages = [pages_of(request, room)[: -(-num_tokens // PAGE_SIZE)] for request in range(requests)]
    found = batch.empty_prefill(1, requests * num_tokens, sum(map(len, pages)))
    positions = np.arange(num_tokens, dtype=np.int32)
    found.token_ids[0] = token_ids(requests, room)[:, :num_tokens].reshape(-1)
    found.positions[0] = np.tile(positions, requests)
    found.slots[0] = np.concatenate([slots_of(r, positions, room) for r in range(requests)])
    found.request[0] = np.repeat(np.arange(requests), num_tokens)
    found.page_ids[0] = np.concatenate(pages)
    found.page_request[0] = np.repeat(np.arange(requests), len(pages[0]))
    found.page_start[0] = np.tile(np.arange(len(pages[0])) * PAGE_SIZE, requests)
    found.num_pages[0] = sum(map(len, pages))
    return found


def decode_batch(requests: int, room: int) -> batch.DecodeBatch:
    """The last of `room` tokens of each request."""
    found = batch.empty_decode(1, requests, len(pages_of(0, room)))
    last = np.array([room - 1], np.int32)
    for request in range(requests):
        found.token_ids[0, request] = token_ids(requests, room)[request, -1]
        found.positions[0, request] = room - 1
        found.slots[0, request] = slots_of(request, last, room)[0]
        found.page_table[0, request] = pages_of(request, room)
    return found


def make_cache(model: ShardedModel, arrays: Batch) -> kv_cache.KVCache:
    pages = arrays.page_ids if isinstance(arrays, batch.PrefillBatch) else arrays.page_table
    num_pages = 1 + int(np.max(pages))
    return kv_cache.allocate(
        model.config, model.mesh, num_pages=num_pages, page_size=PAGE_SIZE, dtype=model.dtype
    )


def check(model: ShardedModel, plans: tuple[ExecutionPlan, ExecutionPlan]) -> dict[str, Any]:
    """Relative differences of the last tokens' hidden states, however they are computed.

    One token whose experts differ, because two scores were nearly equal, is not an error: the
    median over tokens is reported.
    """
    plain = [dataclasses.replace(plan, **PLAIN) for plan in plans]
    whole = prefill_batch(8, CHECKED_TOKENS)
    last = slice(CHECKED_TOKENS - 1, None, CHECKED_TOKENS)

    def last_states(plans: Sequence[ExecutionPlan], *, decoded: bool) -> np.ndarray:
        steps = Steps(model, prefill=plans[0], decode=plans[1])
        cache = make_cache(model, whole)
        if not decoded:
            return np.asarray(steps.forward(cache, whole)[0][0][last], np.float32)
        most = prefill_batch(8, CHECKED_TOKENS - 1, CHECKED_TOKENS)
        cache = steps.forward(cache, most)[1]
        return np.asarray(steps.forward(cache, decode_batch(8, CHECKED_TOKENS))[0][0], np.float32)

    prefilled, decoded = (last_states(plans, decoded=decoded) for decoded in (False, True))
    plain_prefilled = last_states(plain, decoded=False)
    if not np.isfinite(prefilled).all() or not np.isfinite(decoded).all():
        raise AssertionError("hidden states are not finite")
    return {
        "difference": {
            "prefill_from_plain_jax": relative(prefilled, plain_prefilled),
            "decode_from_plain_jax": relative(decoded, last_states(plain, decoded=True)),
            "decode_from_prefill": relative(decoded, prefilled),
        }
    }


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.median(norms))


def measure(
    model: ShardedModel, steps: Steps, arrays: Batch, num_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    state = {"cache": make_cache(model, arrays)}
    arrays = jax.device_put(arrays, sharding.per_rank(model.mesh))

    def step() -> jax.Array:
        hidden, state["cache"] = steps.forward(state["cache"], arrays)
        return jax.block_until_ready(hidden)

    with_kernels = deep_gemm.missing() is None
    before = deep_gemm.launches() if with_kernels else {}
    step()
    launches = {
        name: count - before[name]
        for name, count in (deep_gemm.launches() if with_kernels else {}).items()
    }
    step()
    compilations = CompilationCounter()
    seconds = [timed(step) for _ in range(args.repeats)]
    median = statistics.median(seconds)
    return {
        "tokens": num_tokens,
        "ms": 1e3 * median,
        "tokens_per_s": num_tokens / median,
        "launches_of_first_step": launches,
        "compilations_while_timing": compilations.count,
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
