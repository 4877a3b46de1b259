"""Random checkpoints: reproducible, and not degenerate."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint
from jaxmoe.config import ModelConfig


def tensors_of(path):
    return {
        name: value
        for file in sorted(path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("name", sorted(RANDOM_CONFIGS))
def test_named_configurations(name):
    config = ModelConfig.from_hf(RANDOM_CONFIGS[name])
    assert config.num_moe_layers >= 1
    assert config.n_routed_experts % 8 == 0


def test_same_seed_same_model_whatever_the_shards(tmp_path):
    config = RANDOM_CONFIGS["tiny"]
    one, two, other = (
        tensors_of(write_random_checkpoint(tmp_path / name, config, seed=seed, **options))
        for name, seed, options in (
            ("one", 1, {}),
            ("two", 1, {"max_shard_bytes": 10_000}),
            ("other", 2, {}),
        )
    )
    assert one.keys() == two.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])
        assert (value != other[name]).any()
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == two.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in two.values())


def test_values_tell_tensors_apart(checkpoint_of):
    tensors = tensors_of(checkpoint_of("v3-small", dtype="float32"))
    for name, value in tensors.items():
        if "norm" in name:
            assert 0.02 < np.abs(value - 1).mean() < 0.2, name
        elif "bias" in name:
            assert 0.01 < np.abs(value).mean() < 0.1, name
        elif name.endswith("proj.weight"):
            assert value.std() == pytest.approx(value.shape[1] ** -0.5, rel=0.1), name


def test_never_overwrites(tmp_path):
    write_random_checkpoint(tmp_path, RANDOM_CONFIGS["tiny"], seed=0)
    with pytest.raises(ValueError, match="already holds a model"):
        write_random_checkpoint(tmp_path, RANDOM_CONFIGS["tiny"], seed=1)
