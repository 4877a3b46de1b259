"""Models whose weights stay FP8: from FP8 directories and quantised while loading."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmoe import sharding
from jaxmoe.checkpoint import (
    RANDOM_CONFIGS,
    CheckpointError,
    convert,
    load_hf,
    load_model,
    store,
)
from jaxmoe.checkpoint.fp8 import SCALE_SUFFIX, block_scales, dequantise, is_quantised, quantise
from jaxmoe.checkpoint.parameters import list_parameters
from jaxmoe.checkpoint.quantize import quantize
from jaxmoe.checkpoint.tensor_file import find_tensors
from jaxmoe.config import ModelConfig
from jaxmoe.plan import Quantization
from jaxmoe.sharding import PER_RANK, REPLICATED
from jaxmoe.step import path_names


FP8 = Quantization.FP8
NAME = "fp8-small"
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@pytest.fixture(scope="module")
def quantised(checkpoint_of, tmp_path_factory):
    made = {}

    def get(dtype):
        if dtype not in made:
            target = tmp_path_factory.mktemp("quantised") / dtype
            made[dtype] = quantize(checkpoint_of(NAME, dtype=dtype), target)
        return made[dtype]

    return get


def by_name(model):
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    return {".".join(map(str, path_names(path))): leaf for path, leaf in leaves}


def stored_slot(tensors, name, expert):
    """What a slot of a stacked parameter, or of its scales, is made from."""
    prefix, kind = name.rsplit(".", 1)
    suffix = SCALE_SUFFIX if kind.endswith(SCALE_SUFFIX) else ""
    return np.concatenate(
        [
            tensors[f"{prefix}.{expert}.{part}.weight{suffix}"].read()
            for part in PARTS[kind.removesuffix(SCALE_SUFFIX)]
        ]
    )


@pytest.mark.parametrize("block", [(128, 128), (16, 32)])
@pytest.mark.parametrize("shape", [(1, 1), (129, 200), (300, 127)])
def test_scales_alone_are_those_of_the_values(shape, block):
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    np.testing.assert_array_equal(block_scales(values, block), quantise(values, block)[1])


@pytest.mark.parametrize(("ep_size", "num_slots"), [(1, None), (8, None), (4, 24), (3, 18)])
def test_every_parameter_is_its_tensor(quantised, ep_size, num_slots):
    model_dir = quantised("bfloat16")
    tensors = find_tensors(model_dir)
    model = load_hf(
        model_dir,
        sharding.make_mesh(ep_size),
        dtype=jnp.bfloat16,
        quantization=FP8,
        num_slots=num_slots,
    )
    assert model.quantization is FP8
    used = set()
    for name, value in by_name(model).items():
        if ".experts." in name:
            assert value.dtype == (
                jnp.float32 if name.endswith(SCALE_SUFFIX) else jnp.float8_e4m3fn
            )
            shards = {shard.data.shape[0] for shard in value.addressable_shards}
            assert shards == {model.slots_per_rank}
            for slot in range(model.num_slots):
                wanted = stored_slot(tensors, name, slot % 16)
                np.testing.assert_array_equal(np.asarray(value[slot]), wanted, err_msg=name)
            continue
        used.add(name)
        wanted = tensors[name].read()
        if name.endswith("kv_b_proj.weight"):
            used.add(name + SCALE_SUFFIX)
            scale = tensors[name + SCALE_SUFFIX].read()
            wanted = dequantise(wanted, scale, (128, 128), np.dtype(ml_dtypes.bfloat16))
        elif name.endswith(".mlp.gate.weight") or name.endswith("e_score_correction_bias"):
            wanted = wanted.astype(np.float32)
        assert value.dtype == wanted.dtype, name
        np.testing.assert_array_equal(np.asarray(value), wanted, err_msg=name)
    assert used == {name for name in tensors if ".experts." not in name}


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_quantising_while_loading_is_quantising_first(
    checkpoint_of, quantised, assert_same_model, source, dtype
):
    mesh = sharding.make_mesh(4)
    options = dict(dtype=dtype, quantization=FP8, num_slots=20)
    assert_same_model(
        load_model(checkpoint_of(NAME, dtype=source), mesh, **options),
        load_model(quantised(source), mesh, **options),
    )


def test_a_random_fp8_checkpoint_is_a_quantised_one(checkpoint_of, quantised, assert_same_model):
    mesh = sharding.make_mesh(2)
    options = dict(dtype=jnp.float32, quantization=FP8)
    assert_same_model(
        load_model(checkpoint_of(NAME, dtype="float32", fp8=True), mesh, **options),
        load_model(quantised("float32"), mesh, **options),
    )


def test_scales_lie_where_their_weights_do():
    config = ModelConfig.from_hf(RANDOM_CONFIGS[NAME])
    parameters = {p.name: p for p in list_parameters(config, 24, jnp.bfloat16, FP8)}
    scales = [p for p in parameters.values() if p.is_scale]
    assert scales
    for scale in scales:
        weight = parameters[scale.name.removesuffix(SCALE_SUFFIX)]
        assert (scale.spec, scale.layer, scale.is_expert) == (
            weight.spec,
            weight.layer,
            weight.is_expert,
        )
        assert scale.spec == (PER_RANK if ".experts." in scale.name else REPLICATED)
        grid = tuple(-(-n // 128) for n in weight.shape[-2:])
        assert scale.shape == (*weight.shape[:-2], *grid)
    quantised = {p.name for p in parameters.values() if p.dtype == np.dtype(jnp.float8_e4m3fn)}
    assert {p.name.removesuffix(SCALE_SUFFIX) for p in scales} == quantised
    left = {
        name.split(".")[-2]
        for name in parameters
        if ".experts." not in name and is_quantised(name) and name not in quantised
    }
    assert left == {"kv_b_proj"}


def rewrite(source, target, change, change_config=lambda config: config):
    target.mkdir()
    tensors = {name: tensor.read() for name, tensor in find_tensors(source).items()}
    save_file(change(tensors), target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(change_config(config)))
    return target


def test_refused(checkpoint_of, quantised, tmp_path):
    mesh = sharding.make_mesh(1)

    def refused(model_dir, error, *words):
        with pytest.raises(error) as caught:
            load_model(model_dir, mesh, dtype=jnp.float32, quantization=FP8)
        for word in words:
            assert word in str(caught.value)

    other_block = rewrite(
        quantised("bfloat16"),
        tmp_path / "block",
        lambda tensors: tensors,
        lambda c: (
            c | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
        ),
    )
    refused(other_block, ValueError, "weight_block_size", "[64, 64]", "--quantization none")
    refused(checkpoint_of("tiny", fp8=True), ValueError, "moe_intermediate_size", "32")
    name = "model.layers.1.self_attn.o_proj.weight"
    left_out = rewrite(
        quantised("bfloat16"),
        tmp_path / "left",
        lambda tensors: tensors | {name: tensors[name].astype(ml_dtypes.bfloat16)},
    )
    refused(left_out, CheckpointError, repr(name), "BF16", "--quantization none")
    load_model(left_out, mesh, dtype=jnp.float32)
    infinite = rewrite(
        checkpoint_of(NAME),
        tmp_path / "infinite",
        lambda tensors: tensors | {name: np.full_like(tensors[name], np.inf)},
    )
    refused(infinite, CheckpointError, repr(name), "not finite")


@pytest.fixture(scope="module")
def converted(checkpoint_of, tmp_path_factory):
    target = tmp_path_factory.mktemp("orbax") / "native"
    return convert(checkpoint_of(NAME, fp8=True), target)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestOrbax:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize(("ep_size", "num_slots"), [(1, None), (8, None), (4, 20), (3, None)])
    def test_restores_fp8(
        self, checkpoint_of, converted, assert_same_model, ep_size, num_slots, dtype
    ):
        mesh = sharding.make_mesh(ep_size)
        options = dict(dtype=dtype, quantization=FP8, num_slots=num_slots)
        assert_same_model(
            load_model(converted, mesh, **options),
            load_model(checkpoint_of(NAME, fp8=True), mesh, **options),
        )

    def test_quantises_while_converting(self, checkpoint_of, tmp_path, assert_same_model):
        source = checkpoint_of(NAME)
        target = convert(source, tmp_path / "fp8", quantization="fp8")
        assert ModelConfig.load(target).weight_block_size == (128, 128)
        mesh = sharding.make_mesh(2)
        options = dict(dtype=jnp.bfloat16, quantization=FP8)
        assert_same_model(load_model(target, mesh, **options), load_model(source, mesh, **options))

    def test_a_directory_is_loaded_as_it_was_converted(self, checkpoint_of, converted, tmp_path):
        mesh = sharding.make_mesh(1)
        with pytest.raises(ValueError, match="of --quantization fp8, not none: convert its source"):
            load_model(converted, mesh, dtype=jnp.float32)
        plain = convert(checkpoint_of(NAME), tmp_path / "plain")
        with pytest.raises(ValueError, match="of --quantization none, not fp8"):
            load_model(plain, mesh, dtype=jnp.float32, quantization=FP8)

    def test_directories_of_the_first_version_load(self, checkpoint_of, tmp_path):
        plain = convert(checkpoint_of("tiny"), tmp_path / "plain")
        old = shutil.copytree(plain, tmp_path / "old")
        (old / store.MARKER_FILE).write_text('{"format_version": 1}')
        load_model(old, sharding.make_mesh(1), dtype=jnp.float32)
