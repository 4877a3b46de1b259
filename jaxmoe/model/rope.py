"""Rotary position embedding with YaRN, on DeepSeek's interleaved pairs.

Pair i of a vector is its elements 2i and 2i+1, before and after: the one layout of this project,
in queries, keys and cache alike. (transformers moves V3's pairs apart; scores are the same.)
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxmoe.config import ModelConfig, YarnScaling


Rotation = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]
"""Cosines and sines of each token's position, one for each pair."""


def rotation(positions: Int32[Array, " T"], config: ModelConfig) -> Rotation:
    """The rotation of each position; negative positions (padding) give that of position 0."""
    frequencies = jnp.asarray(inverse_frequencies(config))
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * frequencies[None, :]
    scale = config.rope_scaling.embedding_scale if config.rope_scaling else 1.0
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: Float[Array, "T *N rope"], rotation: Rotation) -> Float[Array, "T *N rope"]:
    """Rotate the pairs of x, in float32."""
    num_tokens, *heads, _ = x.shape
    cos, sin = (part.reshape(num_tokens, *(1 for _ in heads), -1) for part in rotation)
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, [qk_rope_head_dim / 2], float32."""
    dim, base = config.qk_rope_head_dim, config.rope_theta
    frequencies = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if config.rope_scaling is None:
        return frequencies.astype(np.float32)
    yarn = config.rope_scaling
    low = _pair_with_rotations(yarn.beta_fast, dim, base, yarn)
    high = _pair_with_rotations(yarn.beta_slow, dim, base, yarn)
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    interpolated = np.clip(ramp, 0, 1)
    mixed = frequencies / yarn.factor * interpolated + frequencies * (1 - interpolated)
    return mixed.astype(np.float32)


def _pair_with_rotations(turns: float, dim: int, base: float, yarn: YarnScaling) -> float:
    """The (fractional) pair that turns this often over the original context."""
    wavelength = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(base))
