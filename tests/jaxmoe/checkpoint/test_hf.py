"""Hugging Face directories: every parameter in its place, every damage named."""

import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, CheckpointError, load_hf, load_model
from jaxmoe.checkpoint.fp8 import dequantise, quantise
from jaxmoe.checkpoint.synthetic import write_random_checkpoint
from jaxmoe.checkpoint.tensor_file import find_tensors, read_header
from jaxmoe.step import path_names


NORM = "model.layers.1.input_layernorm.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def by_name(model):
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    return {".".join(map(str, path_names(path))): leaf for path, leaf in leaves}


def stored(model_dir):
    """All tensors as the safetensors library reads them."""
    return {
        name: value
        for path in sorted(model_dir.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def expert_slot(tensors, name, expert):
    prefix, kind = name.rsplit(".", 1)
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return np.concatenate([tensors[f"{prefix}.{expert}.{part}.weight"] for part in parts])


@pytest.mark.parametrize(
    ("ep_size", "num_slots", "expected_slots"),
    [(1, None, 16), (3, None, 18), (4, 16, 16), (8, None, 16), (8, 24, 24), (2, 34, 34)],
)
def test_every_parameter_is_its_tensor(checkpoint_of, ep_size, num_slots, expected_slots):
    model_dir = checkpoint_of("v3-small", max_shard_bytes=300_000)
    assert len(list(model_dir.glob("*.safetensors"))) > 3
    tensors = stored(model_dir)
    mesh = sharding.make_mesh(ep_size)
    model = load_hf(model_dir, mesh, dtype=jnp.bfloat16, num_slots=num_slots)
    assert model.num_slots == expected_slots
    assert np.array_equal(model.placement.physical_to_logical[0], np.arange(expected_slots) % 16)
    used = 0
    for name, value in by_name(model).items():
        if ".experts." in name:
            assert value.shape[0] == expected_slots
            assert {s.data.shape[0] for s in value.addressable_shards} == {
                expected_slots // ep_size
            }
            for slot in range(expected_slots):
                wanted = expert_slot(tensors, name, slot % 16)
                np.testing.assert_array_equal(np.asarray(value[slot]), wanted, err_msg=name)
        else:
            used += 1
            assert value.sharding.is_fully_replicated
            np.testing.assert_array_equal(
                np.asarray(value), tensors[name].astype(value.dtype), err_msg=name
            )
    assert used == sum(".experts." not in name for name in tensors)


@pytest.mark.parametrize("name", sorted(RANDOM_CONFIGS))
def test_named_configurations_load(checkpoint_of, name):
    model = load_model(checkpoint_of(name), sharding.make_mesh(8), dtype=jnp.float32)
    arrays = by_name(model)
    assert ("lm_head.weight" in arrays) != RANDOM_CONFIGS[name]["tie_word_embeddings"]
    assert all(array.dtype == jnp.float32 for array in arrays.values())


def test_sharding_of_files_does_not_matter(checkpoint_of, assert_same_model):
    mesh = sharding.make_mesh(2)
    one, many = (
        load_hf(checkpoint_of("v2-small", **options), mesh, dtype=jnp.bfloat16)
        for options in ({}, {"max_shard_bytes": 1})
    )
    assert_same_model(many, one)


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_casts(checkpoint_of, tmp_path, source, dtype):
    model_dir = rewrite(
        checkpoint_of("tiny", dtype="float32"),
        tmp_path,
        lambda tensors: {name: value.astype(source) for name, value in tensors.items()},
    )
    tensors = stored(model_dir)
    arrays = by_name(load_hf(model_dir, sharding.make_mesh(2), dtype=dtype))
    np.testing.assert_array_equal(np.asarray(arrays[NORM]), tensors[NORM].astype(dtype))
    experts = np.asarray(arrays["model.layers.1.mlp.experts.gate_up_proj"][3])
    assert experts.dtype == dtype
    np.testing.assert_array_equal(np.split(experts, 2)[1], tensors[EXPERT].astype(dtype))
    for router in ("weight", "e_score_correction_bias"):
        router = f"model.layers.1.mlp.gate.{router}"
        assert arrays[router].dtype == np.float32
        np.testing.assert_array_equal(
            np.asarray(arrays[router]), tensors[router].astype(np.float32)
        )


def dequantise_oracle(values, scale, block):
    result = np.zeros(values.shape, np.float64)
    for row, column in np.ndindex(*values.shape):
        result[row, column] = float(values[row, column]) * float(
            scale[row // block[0], column // block[1]]
        )
    return result


@pytest.mark.parametrize("block", [(128, 128), (16, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 200), (40, 131), (127, 96)])
def test_dequantise(shape, block):
    rng = np.random.default_rng(sum(shape))
    original = rng.standard_normal(shape, np.float32)
    values, scale = quantise(original, block)
    assert scale.shape == tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    oracle = dequantise_oracle(values, scale, block)
    exact = dequantise(values, scale, block, np.dtype(np.float32))
    np.testing.assert_allclose(exact, oracle, rtol=1e-7)
    rounded = dequantise(values, scale, block, np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(rounded, exact.astype(ml_dtypes.bfloat16))
    assert np.linalg.norm(exact - original) < 0.04 * np.linalg.norm(original)


@pytest.mark.parametrize("ep_size", [1, 8])
def test_fp8_checkpoint_dequantised(checkpoint_of, ep_size):
    model_dir = checkpoint_of("v3-small", fp8=True)
    plain = stored(checkpoint_of("v3-small"))
    arrays = by_name(load_hf(model_dir, sharding.make_mesh(ep_size), dtype=jnp.float32))
    names = [
        "model.layers.0.mlp.gate_proj.weight",  # 320 rows: a ragged last block
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.3.mlp.experts.down_proj",
    ]
    for name in names:
        expected = expert_slot(plain, name, 5) if ".experts." in name else plain[name]
        expected = expected.astype(np.float32)
        found = np.asarray(arrays[name][5] if ".experts." in name else arrays[name])
        difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0.005 < difference < 0.04, name
    not_quantised = "model.layers.2.mlp.gate.weight"
    np.testing.assert_array_equal(
        np.asarray(arrays[not_quantised]), plain[not_quantised].astype(np.float32)
    )


def rewrite(source, tmp_path, change, change_config=lambda config: config):
    """A copy of a single-file checkpoint with its tensors and configuration changed."""
    target = tmp_path / "changed"
    target.mkdir()
    # safetensors' own reader knows no float8.
    tensors = {name: tensor.read() for name, tensor in find_tensors(source).items()}
    save_file(change(tensors), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(change_config(config)))
    return target


def refused(model_dir, *words):
    with pytest.raises(CheckpointError) as caught:
        load_model(model_dir, sharding.make_mesh(2), dtype=jnp.float32)
    for word in words:
        assert word in str(caught.value), caught.value


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize("name", [NORM, EXPERT, "model.embed_tokens.weight"])
def test_missing_tensor(checkpoint_of, tmp_path, name):
    refused(rewrite(checkpoint_of("tiny"), tmp_path, without(name)), repr(name), "missing")


@pytest.mark.parametrize(("name", "expected"), [(NORM, "[64]"), (EXPERT, "[32, 64]")])
def test_misshaped_tensor(checkpoint_of, tmp_path, name, expected):
    wrong = np.zeros((3, 5), np.float32)
    model_dir = rewrite(checkpoint_of("tiny"), tmp_path, lambda t: t | {name: wrong})
    refused(model_dir, repr(name), "model.safetensors", expected, "[3, 5]")


def test_wrong_dtype(checkpoint_of, tmp_path):
    wrong = np.zeros(64, np.int32)
    model_dir = rewrite(checkpoint_of("tiny"), tmp_path, lambda t: t | {NORM: wrong})
    refused(model_dir, repr(NORM), "model.safetensors", "I32", "BF16")


def test_fp8_without_scale(checkpoint_of, tmp_path):
    scale = EXPERT + "_scale_inv"
    model_dir = rewrite(checkpoint_of("tiny", fp8=True), tmp_path, without(scale))
    refused(model_dir, repr(scale), "missing")


def test_fp8_with_misshaped_scale(checkpoint_of, tmp_path):
    scale = EXPERT + "_scale_inv"
    wrong = np.ones((2, 1), np.float32)
    model_dir = rewrite(checkpoint_of("tiny", fp8=True), tmp_path, lambda t: t | {scale: wrong})
    refused(model_dir, repr(scale), "[1, 1]", "[2, 1]", "128")


def test_fp8_without_quantization_config(checkpoint_of, tmp_path):
    def drop(config):
        del config["quantization_config"]
        return config

    model_dir = rewrite(checkpoint_of("tiny", fp8=True), tmp_path, lambda t: t, drop)
    refused(model_dir, "proj.weight", "quantization_config")


def test_unknown_tensor_is_refused(checkpoint_of, tmp_path):
    extra = "model.layers.0.self_attn.q_a_proj.bias"
    model_dir = rewrite(
        checkpoint_of("tiny"), tmp_path, lambda t: t | {extra: np.zeros(32, np.float32)}
    )
    refused(model_dir, repr(extra), "model.safetensors")


def test_harmless_extras_are_ignored(checkpoint_of, tmp_path, assert_same_model):
    extras = {
        "model.layers.2.eh_proj.weight": np.zeros((64, 128), np.float32),
        "model.layers.2.mlp.experts.0.gate_proj.weight": np.zeros((1, 1), np.int32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "lm_head.weight": np.zeros((256, 64), np.float32),
    }
    mesh = sharding.make_mesh(2)
    source = checkpoint_of("tiny")
    model_dir = rewrite(source, tmp_path, lambda t: t | extras)
    assert_same_model(
        load_hf(model_dir, mesh, dtype=jnp.float32), load_hf(source, mesh, dtype=jnp.float32)
    )


@pytest.fixture
def sharded_copy(checkpoint_of, tmp_path):
    source = checkpoint_of("tiny", max_shard_bytes=50_000)
    shutil.copytree(source, tmp_path / "copy")
    return tmp_path / "copy"


def test_truncated_data(sharded_copy):
    path = sorted(sharded_copy.glob("*.safetensors"))[1]
    last = max(read_header(path).values(), key=lambda tensor: tensor.offset)
    path.write_bytes(path.read_bytes()[:-1])
    refused(sharded_copy, path.name, "truncated", repr(last.name), str(list(last.shape)))


@pytest.mark.parametrize("size", [0, 5, 100])
def test_truncated_header(sharded_copy, size):
    path = sorted(sharded_copy.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:size])
    refused(sharded_copy, path.name, "truncated", "tensor 'model.")


def test_damaged_header(sharded_copy):
    path = sorted(sharded_copy.glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(bytes(data))
    refused(sharded_copy, path.name, "header", "tensor 'model.")


def test_missing_file(sharded_copy):
    path = sorted(sharded_copy.glob("*.safetensors"))[1]
    path.unlink()
    refused(sharded_copy, path.name, "missing", "tensor 'model.")


def change_index(model_dir, change):
    path = model_dir / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_index_that_misplaces_a_tensor(sharded_copy):
    def change(index):
        files = sorted(set(index["weight_map"].values()))
        index["weight_map"][NORM] = next(f for f in files if f != index["weight_map"][NORM])

    change_index(sharded_copy, change)
    refused(sharded_copy, repr(NORM), ".safetensors")


def test_index_that_leaves_the_directory(sharded_copy):
    change_index(sharded_copy, lambda index: index["weight_map"].update({NORM: "../x.safetensors"}))
    refused(sharded_copy, repr(NORM), "outside")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(sharded_copy, text):
    (sharded_copy / "model.safetensors.index.json").write_text(text)
    refused(sharded_copy, "index.json", "weight_map")


def test_not_a_model_path(tmp_path):
    refused(tmp_path, str(tmp_path), "model.safetensors", "jaxmoe convert")
    refused(tmp_path / "absent", "absent", "not a directory")


@pytest.mark.parametrize(
    ("ep_size", "num_slots", "message"),
    [
        (8, 20, r"\(20\) must be divisible by ep_size \(8\); 24 would be"),
        (3, 16, r"\(16\) must be divisible by ep_size \(3\); 18 would be"),
        (4, 12, r"\(12\) must be at least n_routed_experts \(16\)"),
        (1, 0, r"\(0\) must be at least n_routed_experts \(16\)"),
    ],
)
def test_impossible_num_slots(checkpoint_of, ep_size, num_slots, message):
    with pytest.raises(ValueError, match=message):
        load_hf(
            checkpoint_of("v3-small"),
            sharding.make_mesh(ep_size),
            dtype=jnp.bfloat16,
            num_slots=num_slots,
        )


MEASURE = """
import re, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from jaxmoe import sharding
from jaxmoe.checkpoint import load_model
from jaxmoe.config import ModelConfig
from jaxmoe.plan import resolve_quantization

def kilobytes(field):
    with open("/proc/self/status") as status:
        return int(re.search(field + r":\\s+(\\d+) kB", status.read())[1])

warm_up, path, dtype, quantization = sys.argv[1:]
mesh = sharding.make_mesh(4)
load_model(warm_up, mesh, dtype=np.dtype("float32"))
before = kilobytes("VmRSS")
quantization = resolve_quantization(quantization, ModelConfig.load(path))
model = load_model(path, mesh, dtype=jax.numpy.dtype(dtype), quantization=quantization)
jax.block_until_ready(model.params)
leaves = jax.tree.leaves(model.params)
held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
print(held, 1024 * (kilobytes("VmHWM") - before))
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("fp8", "dtype", "quantization", "num_layers"),
    [
        (False, "float32", "none", 8),
        (True, "bfloat16", "none", 14),
        (True, "bfloat16", "fp8", 22),
        (False, "bfloat16", "fp8", 22),
    ],
)
def test_host_memory_is_one_model(checkpoint_of, tmp_path, fp8, dtype, quantization, num_layers):
    config = RANDOM_CONFIGS["v3-small"] | {
        "hidden_size": 512,
        "moe_intermediate_size": 320 if quantization == "none" else 384,
        "num_hidden_layers": num_layers,
    }
    path = write_random_checkpoint(tmp_path / "large", config, seed=0, dtype="bfloat16", fp8=fp8)
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint_of("tiny")), str(path), dtype, quantization],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    held, peak = map(int, output.split())
    assert held > 200e6
    assert peak < 1.35 * held
