"""FP8 checkpoints made of others: which tensors, how far off, and what is refused."""

import argparse
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, CheckpointError, load_hf, write_random_checkpoint
from jaxmoe.checkpoint import quantize as quantizing
from jaxmoe.checkpoint.fp8 import is_quantised, quantise
from jaxmoe.checkpoint.quantize import quantize
from jaxmoe.checkpoint.tensor_file import INDEX_FILE, SINGLE_FILE, find_tensors
from jaxmoe.config import ModelConfig


E4M3_HALF_STEP = 2.0**-4  # of a normal number, relative to it
E4M3_HALF_SUBNORMAL = 2.0**-10
QUANTISED = {
    "q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
}  # fmt: skip


def oracle_bound(original, block):
    """The largest error a block's elements may have, in float64."""
    rows, columns = block
    bound = np.empty(original.shape, np.float64)
    for i in range(0, original.shape[0], rows):
        for j in range(0, original.shape[1], columns):
            values = np.abs(original[i : i + rows, j : j + columns].astype(np.float64))
            scale = max(values.max(), 1e-12) / 448
            bound[i : i + rows, j : j + columns] = np.maximum(
                E4M3_HALF_STEP * values, E4M3_HALF_SUBNORMAL * scale
            )
    return bound * (1 + 1e-5)  # the scale itself is rounded to float32


def oracle_values(values, scale, block):
    spread = np.kron(scale.astype(np.float64), np.ones(block))
    return values.astype(np.float64) * spread[: values.shape[0], : values.shape[1]]


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (127, 129), (300, 17), (5, 512)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block", [(128, 128), (16, 32)])
def test_error_of_each_element(shape, dtype, block):
    generator = np.random.default_rng(0)
    # Magnitudes over many orders, so that every block has subnormal float8 values.
    values = generator.standard_normal(shape) * 10.0 ** generator.uniform(-6, 2, shape)
    values = values.astype(dtype)
    quantised, scale = quantise(values, block)
    assert quantised.dtype == ml_dtypes.float8_e4m3fn and quantised.shape == shape
    assert scale.dtype == np.float32
    assert scale.shape == tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    found = oracle_values(quantised, scale, block)
    assert (np.abs(found - values.astype(np.float64)) <= oracle_bound(values, block)).all()
    # The largest value of a block is the largest float8, so none of the range is given away.
    assert np.abs(quantised.astype(np.float32)).max() == 448


def test_zeros_and_a_block_of_zeros():
    values = np.zeros((256, 128), np.float32)
    values[200, 3] = -7
    quantised, scale = quantise(values, (128, 128))
    assert np.isfinite(scale).all() and (scale > 0).all()
    np.testing.assert_allclose(oracle_values(quantised, scale, (128, 128)), values, rtol=1e-6)


def test_names():
    prefix = "model.layers.3."
    for name in (
        "self_attn.q_a_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "mlp.down_proj.weight",
        "mlp.experts.17.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ):
        assert is_quantised(prefix + name)
    for name in (
        "self_attn.q_a_layernorm.weight",
        "self_attn.o_proj.bias",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "eh_proj.weight",
        "shared_head.head.weight",
    ):
        assert not is_quantised(prefix + name)
    assert not is_quantised("lm_head.weight") and not is_quantised("model.embed_tokens.weight")


@pytest.mark.parametrize("name", sorted(RANDOM_CONFIGS))
@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 200_000}, {"dtype": "float32"}])
def test_directory(checkpoint_of, tmp_path, name, options):
    source = checkpoint_of(name, **options)
    target = quantize(source, tmp_path / "fp8")
    before, after = find_tensors(source), find_tensors(target)
    weights = {n for n in before if n.split(".")[-2] in QUANTISED}
    assert weights
    assert after.keys() == before.keys() | {n + "_scale_inv" for n in weights}
    for tensor in before.values():
        other = after[tensor.name]
        assert other.shape == tensor.shape and other.path.name == tensor.path.name
        if tensor.name in weights:
            scale = after[tensor.name + "_scale_inv"]
            assert (other.dtype, scale.dtype) == ("F8_E4M3", "F32")
            original = tensor.read()
            found = oracle_values(other.read(), scale.read(), (128, 128))
            error = np.abs(found - original.astype(np.float64))
            assert (error <= oracle_bound(original, (128, 128))).all(), tensor.name
        else:
            assert other.dtype == tensor.dtype
            np.testing.assert_array_equal(other.read(), tensor.read())
    raw = json.loads((target / "config.json").read_text())
    assert raw.pop("quantization_config") == quantizing.QUANTIZATION_CONFIG
    assert raw == json.loads((source / "config.json").read_text())
    if (source / INDEX_FILE).is_file():
        index = json.loads((target / INDEX_FILE).read_text())
        assert index["weight_map"] == {n: t.path.name for n, t in after.items()}
        assert index["metadata"]["total_size"] == sum(t.num_bytes for t in after.values())


def test_is_what_a_random_fp8_checkpoint_is(tmp_path, assert_same_model):
    config = RANDOM_CONFIGS["v3-small"]
    mesh = sharding.make_mesh(2)
    plain = write_random_checkpoint(tmp_path / "plain", config, seed=5, dtype="float32")
    direct = write_random_checkpoint(tmp_path / "direct", config, seed=5, dtype="float32", fp8=True)
    ours = quantize(plain, tmp_path / "ours")
    assert_same_model(
        load_hf(ours, mesh, dtype=jnp.float32), load_hf(direct, mesh, dtype=jnp.float32)
    )
    exact = load_hf(plain, mesh, dtype=jnp.float32)
    differences = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)),
        exact.params,
        load_hf(ours, mesh, dtype=jnp.float32).params,
    )
    assert 0.01 < max(jax.tree.leaves(differences)) < 0.04


def test_safetensors_reads_it(checkpoint_of, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    target = quantize(checkpoint_of("tiny"), tmp_path / "fp8")
    with safetensors.safe_open(target / SINGLE_FILE, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == find_tensors(target).keys()
        name = "model.layers.0.mlp.up_proj.weight_scale_inv"
        np.testing.assert_array_equal(file.get_tensor(name), find_tensors(target)[name].read())
    # Every tensor begins where its elements may.
    for tensor in find_tensors(target).values():
        size = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[tensor.dtype]
        assert tensor.offset % size == 0


def test_memory_is_a_tensor_at_a_time(checkpoint_of, tmp_path):
    source = checkpoint_of("v3-small", dtype="float32")
    tensors = find_tensors(source).values()
    tracemalloc.start()
    quantize(source, tmp_path / "fp8")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < sum(t.num_bytes for t in tensors) / 4


def test_copies_the_tokenizer(tmp_path):
    source = write_random_checkpoint(tmp_path / "source", RANDOM_CONFIGS["tiny"], seed=0)
    (source / "tokenizer.json").write_text("{}")
    (source / "notes.txt").write_text("not the model's")
    target = quantize(source, tmp_path / "target")
    assert (target / "tokenizer.json").read_text() == "{}"
    assert not (target / "notes.txt").exists()


def test_refuses(checkpoint_of, tmp_path):
    source = checkpoint_of("tiny")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    with pytest.raises(ValueError, match="never overwrites"):
        quantize(source, taken)
    with pytest.raises(ValueError, match="quantised already"):
        quantize(checkpoint_of("tiny", fp8=True), tmp_path / "again")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        quantize(tmp_path, tmp_path / "none")


def test_leaves_nothing_behind(tmp_path):
    source = write_random_checkpoint(tmp_path / "source", RANDOM_CONFIGS["tiny"], seed=0)
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = find_tensors(source)[name]
    with tensor.path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.array([np.inf], ml_dtypes.bfloat16).tobytes())
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight.*not finite"):
        quantize(source, tmp_path / "fp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_command(checkpoint_of, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    quantizing.add_arguments(parser)
    arguments = ["--model-path", str(checkpoint_of("tiny")), "--output", str(tmp_path / "fp8")]
    assert quantizing.run(parser.parse_args(arguments)) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fp8")
    assert ModelConfig.load(tmp_path / "fp8").weight_block_size == (128, 128)
