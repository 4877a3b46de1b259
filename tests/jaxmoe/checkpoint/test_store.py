"""Orbax checkpoints: the same model on any number of ranks, and nothing that loads by half."""

import argparse
import gc
import json
import shutil

import jax.numpy as jnp
import pytest

from jaxmoe import sharding
from jaxmoe.checkpoint import CheckpointError, convert, load_hf, load_model, store
from jaxmoe.checkpoint.hf import HfCheckpoint


# Orbax reads an array's shards in coroutines; when one fails, nobody awaits the others' errors.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="session")
def converted(checkpoint_of, tmp_path_factory):
    made = {}

    def get(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            target = tmp_path_factory.mktemp("orbax") / name
            made[key] = convert(checkpoint_of(name, **options), target)
        return made[key]

    return get


@pytest.mark.parametrize(
    ("ep_size", "num_slots"),
    [(1, None), (2, None), (4, None), (8, None), (8, 24), (4, 20), (2, 48), (3, None), (6, None)],
)
def test_restores_onto_any_ranks(checkpoint_of, converted, assert_same_model, ep_size, num_slots):
    mesh = sharding.make_mesh(ep_size)
    found, expected = (
        load_model(path, mesh, dtype=jnp.bfloat16, num_slots=num_slots)
        for path in (converted("v3-small"), checkpoint_of("v3-small"))
    )
    assert_same_model(found, expected)


@pytest.mark.parametrize("name", ["tiny", "v2-small"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_other_models_and_dtypes(checkpoint_of, converted, assert_same_model, name, dtype):
    mesh = sharding.make_mesh(4)
    found, expected = (
        load_model(path, mesh, dtype=dtype) for path in (converted(name), checkpoint_of(name))
    )
    assert found.dtype == dtype
    assert_same_model(found, expected)


def test_float32_stays_float32(checkpoint_of, converted, assert_same_model):
    mesh = sharding.make_mesh(1)
    source = checkpoint_of("tiny", dtype="float32")
    assert_same_model(
        load_model(converted("tiny", dtype="float32"), mesh, dtype=jnp.float32),
        load_model(source, mesh, dtype=jnp.float32),
    )


def test_fp8_is_dequantised_when_asked_for(checkpoint_of, tmp_path, assert_same_model):
    source = checkpoint_of("v3-small", fp8=True)
    path = convert(source, tmp_path / "converted", quantization="none")
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    mesh = sharding.make_mesh(2)
    assert_same_model(
        load_model(path, mesh, dtype=jnp.bfloat16, num_slots=18),
        load_hf(source, mesh, dtype=jnp.bfloat16, num_slots=18),
    )


def test_is_a_complete_model_path(checkpoint_of, tmp_path):
    source = shutil.copytree(checkpoint_of("tiny"), tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"chat_template": ""}')
    target = tmp_path / "a" / "target"
    parser = argparse.ArgumentParser()
    store.add_arguments(parser)
    arguments = ["--model-path", str(source), "--output", str(target)]
    assert store.run(parser.parse_args(arguments)) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((target / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert not list(target.glob("*.safetensors"))
    assert sorted(path.name for path in target.parent.iterdir()) == ["target"]


def test_refuses_a_target_with_something_in_it(checkpoint_of, tmp_path):
    (tmp_path / "kept").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        convert(checkpoint_of("tiny"), tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        convert(checkpoint_of("tiny"), tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_takes_an_empty_target(checkpoint_of, tmp_path):
    target = tmp_path / "empty"
    target.mkdir()
    convert(checkpoint_of("tiny"), target)
    load_model(target, sharding.make_mesh(1), dtype=jnp.float32)


def test_interrupted_conversion_leaves_nothing(checkpoint_of, tmp_path, monkeypatch):
    read_rows, staged_loads = HfCheckpoint.read_rows, []

    def interrupted(self, parameter, *args):
        if parameter.layer == 1:
            # What a crash without cleaning up would leave.
            staged = next(tmp_path.glob(".target-*.partial/model"))
            with pytest.raises(ValueError):
                load_model(staged, sharding.make_mesh(1), dtype=jnp.float32)
            staged_loads.append(staged)
            raise KeyboardInterrupt
        return read_rows(self, parameter, *args)

    monkeypatch.setattr(HfCheckpoint, "read_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint_of("tiny"), tmp_path / "target")
    assert len(staged_loads) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def damaged(converted, tmp_path):
    return shutil.copytree(converted("tiny"), tmp_path / "damaged")


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        load_model(path, sharding.make_mesh(2), dtype=jnp.float32)
    for word in words:
        assert word in str(caught.value), caught.value


def test_missing_layer(damaged):
    shutil.rmtree(damaged / "weights" / "layer_1")
    refused(damaged, "layer_1", "missing", "'model.layers.1.")


def test_layer_that_is_no_checkpoint(damaged):
    for path in (damaged / "weights" / "layer_1").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(damaged, "layer_1")


def test_truncated_data(damaged):
    for path in (damaged / "weights" / "layer_1").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-100])
    refused(damaged, "layer_1")
    gc.collect()


def test_configuration_of_another_model(damaged):
    path = damaged / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"moe_intermediate_size": 48}))
    refused(damaged, "'model.layers.1.mlp.experts.down_proj'", "[8, 64, 48]", "[8, 64, 32]")
    path.write_text(json.dumps(config | {"q_lora_rank": None}))
    refused(damaged, "'model.layers.0.self_attn.q_proj.weight'", "layer_0")


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 99}'])
def test_marker_of_another_version(damaged, text):
    (damaged / store.MARKER_FILE).write_text(text)
    refused(damaged, store.MARKER_FILE, "format_version")
