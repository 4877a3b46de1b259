"""Seeded random checkpoints in Hugging Face's format, for tests, benchmarks and comparisons.

Weights are scaled so that activations stay near one through the layers, norms and correction biases
are not what they would be at initialisation, and router scores are well apart: a comparison on such
a model notices a weight that is dropped, swapped or transposed.
"""

import copy
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from jaxmoe.checkpoint.fp8 import QUANTIZATION_CONFIG, SCALE_SUFFIX, is_quantised, quantise
from jaxmoe.checkpoint.hf import stored_shapes
from jaxmoe.checkpoint.tensor_file import DTYPES, INDEX_FILE, SINGLE_FILE
from jaxmoe.config import ModelConfig


DEFAULT_MAX_SHARD_BYTES = 2 << 30
ROUTER_GAIN = 2.0  # spreads scores, so that rounding does not change a choice
NORM_SPREAD = 0.1
CORRECTION_BIAS_SPREAD = 0.05

_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

RANDOM_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": {
        **_V3,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": 512,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    },
    "v3-small": {
        **_V3,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 320,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "max_position_embeddings": 1024,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
    },
    "fp8-small": {
        **_V3,
        "vocab_size": 512,
        "hidden_size": 192,
        "intermediate_size": 320,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "max_position_embeddings": 1024,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "v2-small": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
        "moe_layer_freq": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
"""Small configurations by name, as contents of a `config.json`; "fp8-small" can also run in FP8."""


def write_random_checkpoint(
    target_dir: Path | str,
    config_json: Mapping[str, Any],
    *,
    seed: int,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    fp8: bool = False,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> Path:
    """Write a model of this configuration; returns the directory.

    A tensor depends on the seed and its name alone. With `fp8` the projections are float8 with
    block scales, as in DeepSeek-V3's own checkpoint, the rest is in `dtype`; the block size is the
    configuration's, 128 x 128 if it names none. One shard is in memory at a time.

    Raises ValueError when the directory already holds a checkpoint.
    """
    target_dir = Path(target_dir)
    raw = copy.deepcopy(dict(config_json))
    raw["torch_dtype"] = dtype
    if fp8:
        raw.setdefault("quantization_config", copy.deepcopy(QUANTIZATION_CONFIG))
    config = ModelConfig.from_hf(raw)
    target_dir.mkdir(parents=True, exist_ok=True)
    if (target_dir / "config.json").exists():
        raise ValueError(f"{target_dir} already holds a model")
    source_dtype = DTYPES[{"bfloat16": "BF16", "float32": "F32"}[dtype]]

    shards: list[dict[str, str]] = []
    pending: dict[str, np.ndarray] = {}

    def flush() -> None:
        if pending:
            file_name = f"shard-{len(shards)}"
            save_file(pending, target_dir / file_name, metadata={"format": "pt"})
            shards.append(dict.fromkeys(pending, file_name))
            pending.clear()

    pending_bytes = total_bytes = 0
    for name, shape in stored_shapes(config).items():
        values = _random_tensor(config, name, shape, seed)
        if fp8 and is_quantised(name):
            assert config.weight_block_size is not None
            quantised, scale = quantise(values, config.weight_block_size)
            tensors = {name: quantised, name + SCALE_SUFFIX: scale}
        else:
            tensors = {name: values.astype(source_dtype)}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if pending_bytes and pending_bytes + num_bytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending.update(tensors)
        pending_bytes += num_bytes
        total_bytes += num_bytes
    flush()

    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file_name = (
            SINGLE_FILE
            if len(shards) == 1
            else f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        )
        (target_dir / f"shard-{index}").rename(target_dir / file_name)
        weight_map.update(dict.fromkeys(shard, file_name))
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (target_dir / INDEX_FILE).write_text(json.dumps(index_json, indent=1), encoding="utf-8")
    (target_dir / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    return target_dir


def _random_tensor(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
    values = generator.standard_normal(shape, np.float32)
    if "norm.weight" in name:
        return 1 + NORM_SPREAD * values
    if name.endswith(("e_score_correction_bias", ".bias")):
        return CORRECTION_BIAS_SPREAD * values
    if name == "model.embed_tokens.weight" and not config.tie_word_embeddings:
        return values
    scale = shape[-1] ** -0.5
    return values * (scale * ROUTER_GAIN if name.endswith("mlp.gate.weight") else scale)
