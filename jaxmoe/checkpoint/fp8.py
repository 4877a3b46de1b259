"""FP8 weights as DeepSeek-V3's checkpoints store them: which tensors, and the rounding.

A matrix is float8 (e4m3) with a float32 scale for each block of 128 x 128, `weight_scale_inv`, by
which a block is multiplied to get its values back (arXiv:2412.19437, section 3.3).
"""

import math

import ml_dtypes
import numpy as np


SCALE_SUFFIX = "_scale_inv"  # of the name of the weight it belongs to
FP8_BLOCK = (128, 128)
FP8_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
MIN_BLOCK_MAX = 1e-12  # a block of zeros has a scale too
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(FP8_BLOCK),
}


def is_quantised(name: str) -> bool:
    """Whether DeepSeek's FP8 checkpoints hold the tensor of this name in float8."""
    matrix = name.removesuffix(".weight").rsplit(".", 1)[-1]
    is_projection = matrix.endswith("_proj") or matrix == "kv_a_proj_with_mqa"
    return name.endswith(".weight") and is_projection and matrix != "eh_proj"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The number of blocks down and across a matrix; the last ones may be cut."""
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def block_scales(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The scale of each block, float32: its largest absolute value over float8's largest.

    A row of blocks at a time, so that a float32 copy of the whole matrix never exists.
    """
    rows, columns = block
    scales = np.empty(scale_shape(values.shape, block), np.float32)
    for row, scale in enumerate(scales):
        strip = values[row * rows : (row + 1) * rows].astype(np.float32)
        largest = np.abs(strip).max(axis=0)
        largest = np.maximum.reduceat(largest, np.arange(0, len(largest), columns))
        scale[...] = np.maximum(largest, MIN_BLOCK_MAX) / FP8_MAX
    return scales


def quantise(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Float8 values and the scale of each block that gives `values` back."""
    scales = block_scales(values, block)
    quantised = np.empty(values.shape, FP8_DTYPE)
    for strip, row_scale, result in _strips(values, scales, block, quantised):
        result[...] = (strip / row_scale).astype(FP8_DTYPE)
    return quantised, scales


def dequantise(
    values: np.ndarray, scale: np.ndarray, block: tuple[int, int], dtype: np.dtype
) -> np.ndarray:
    """values * scale, one scale for each block of rows and columns; the last blocks may be cut.

    Multiplied in float32, a row of blocks at a time, so that a float32 copy of the whole matrix
    never exists beside a narrower result.
    """
    dequantised = np.empty(values.shape, dtype)
    for strip, row_scale, result in _strips(values, scale, block, dequantised):
        result[...] = strip * row_scale
    return dequantised


def _strips(values: np.ndarray, scale: np.ndarray, block: tuple[int, int], result: np.ndarray):
    """Of each row of blocks: the values in float32, a scale for each column [1, columns], and
    where their result goes."""
    rows, columns = block
    for row, row_scale in enumerate(scale):
        here = slice(row * rows, (row + 1) * rows)
        factor = np.repeat(row_scale, columns)[None, : values.shape[1]]
        yield values[here].astype(np.float32), factor, result[here]
