import json

import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS
from jaxmoe.config import ModelConfig, UnsupportedConfigError


# The published configurations, as facts about the architectures.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
    "attention_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}  # fmt: skip


def test_deepseek_v3():
    config = ModelConfig.from_hf(DEEPSEEK_V3)
    assert config.num_moe_layers == 58
    assert config.latent_dim == 576
    assert config.weight_block_size == (128, 128)
    assert config.eos_token_ids == (1,)
    assert config.rope_scaling is not None and config.rope_scaling.embedding_scale == 1.0
    # (0.1 * ln(40) + 1)^2 / sqrt(192)
    assert config.softmax_scale == pytest.approx(1.3688879454**2 / 192**0.5)


def test_rope_parameters_as_new_files_write_them():
    old = dict(DEEPSEEK_V3)
    new = dict(DEEPSEEK_V3)
    scaling = dict(new.pop("rope_scaling"))
    scaling["rope_type"] = scaling.pop("type")
    new["rope_parameters"] = scaling | {"rope_theta": new.pop("rope_theta")}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(old)


@pytest.mark.parametrize("name", RANDOM_CONFIGS)
def test_random_configs_are_supported(name):
    ModelConfig.from_hf(RANDOM_CONFIGS[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'deepseek_v2' or 'deepseek_v3', got 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type='linear'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
        ({"model_type": "deepseek_v2", "scoring_func": "softmax", "topk_method": "greedy"},
         "norm_topk_prob=True"),
    ],
)  # fmt: skip
def test_unsupported_is_refused_by_name(change, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        ModelConfig.from_hf(DEEPSEEK_V3 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"hidden_size": "7168"}, "hidden_size must be a positive integer, got '7168'"),
        ({"n_group": 7}, r"n_routed_experts \(256\) must be divisible by n_group \(7\)"),
        ({"topk_group": 9}, r"topk_group \(9\) must not exceed n_group \(8\)"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok \(129\) must not exceed"),
        ({"n_group": 256, "topk_group": 256}, "at least twice n_group"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even, got 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"eos_token_id": "end"}, "eos_token_id must be an integer"),
    ],
)
def test_impossible_values_are_refused_with_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(DEEPSEEK_V3 | change)


def test_load_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json in"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert ModelConfig.load(tmp_path).hidden_size == 7168
