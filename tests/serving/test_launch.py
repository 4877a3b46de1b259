"""What the flags of `jaxmoe serve` load."""

import argparse

import jax.numpy as jnp
import pytest

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.plan import Quantization
from serving.config import add_arguments, from_arguments
from serving.launch import load


def load_with(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(from_arguments(parser.parse_args(["--ep-size", "2", *flags])), EMBEDDED_MODEL)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), None), (("--quantization", "none"), None), (("--quantization", "fp8"), Quantization.FP8)],
)
def test_quantization(flags, expected):
    model = load_with(*flags)
    assert model.quantization is expected
    experts = model.params["model"]["layers"][1]["mlp"]["experts"]
    wanted = jnp.float32 if expected is None else jnp.float8_e4m3fn
    assert experts["gate_up_proj"].dtype == wanted
    assert ("gate_up_proj_scale_inv" in experts) == (expected is not None)
