import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS
from jaxmoe.config import ModelConfig, YarnScaling
from jaxmoe.model.rope import apply_rope, inverse_frequencies, rotation


CONFIG = ModelConfig.from_hf(RANDOM_CONFIGS["tiny"])
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0)


def test_rotates_interleaved_pairs_as_complex_numbers():
    rng = np.random.default_rng(0)
    positions = np.asarray([0, 1, 5, 1000], np.int32)
    x = rng.standard_normal((4, 3, CONFIG.qk_rope_head_dim)).astype(np.float32)
    got = np.asarray(apply_rope(jnp.asarray(x), rotation(jnp.asarray(positions), CONFIG)))
    pairs = x[..., 0::2].astype(np.complex128) + 1j * x[..., 1::2]
    dim = CONFIG.qk_rope_head_dim
    angle = positions[:, None] / CONFIG.rope_theta ** (np.arange(0, dim, 2) / dim)
    want = pairs * np.exp(1j * angle)[:, None, :]
    np.testing.assert_allclose(got[..., 0::2], want.real, atol=1e-4)
    np.testing.assert_allclose(got[..., 1::2], want.imag, atol=1e-4)


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, CONFIG.qk_rope_head_dim)).astype(np.float32)

    def score(position, other):
        rotated = [
            np.asarray(
                apply_rope(jnp.asarray(x)[None], rotation(jnp.asarray([p], jnp.int32), CONFIG))
            )
            for x, p in ((q[0], position), (k[0], other))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)


def test_yarn_matches_transformers():
    """Frequencies and scale against the rope functions of the PyTorch reference."""
    pytest.importorskip("torch")
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = dataclasses.replace(CONFIG, qk_rope_head_dim=64, rope_scaling=YARN)
    theirs = DeepseekV3Config(
        qk_rope_head_dim=64,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": config.rope_theta, "factor": 8.0,
            "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    np.testing.assert_allclose(inverse_frequencies(config), frequencies.numpy(), rtol=1e-5)
    assert YARN.embedding_scale == pytest.approx(scale)
