"""`gemm`: tokens times one matrix; `gemm_fp8`: the same in FP8; `gemm_by_head`: each head times its
own. Shapes are local."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from custom_calls import cpu_library
from custom_calls.deep_gemm import library
from custom_calls.gemm import cpu, deep_gemm, reference
from custom_calls.layouts import (
    QuantizedRows,
    QuantizedWeight,
    num_scale_blocks,
    num_scale_rows,
)
from custom_calls.select import Implementation, select


_GEMM = {
    "cpu": Implementation(cpu.gemm, "cpu", cpu_library.missing),
    "reference": Implementation(reference.gemm),
}
_FP8 = {
    "deep_gemm": Implementation(deep_gemm.gemm_fp8, "gpu", library.missing),
    "cpu": Implementation(cpu.gemm_fp8, "cpu", cpu_library.missing),
    "reference": Implementation(reference.gemm_fp8),
}
_FP8_TO_F32 = {
    "cpu": Implementation(cpu.gemm_fp8, "cpu", cpu_library.missing),
    "reference": Implementation(reference.gemm_fp8),
}
_BY_HEAD = {
    "cpu": Implementation(cpu.gemm_by_head, "cpu", cpu_library.missing),
    "reference": Implementation(reference.gemm_by_head),
}


def gemm(
    x: Float[Array, "M K"],
    weight: Float[Array, "N K"],
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """`y[m, n] = sum_k x[m, k] * weight[n, k]`, summed in float32.

    x and weight share one dtype, float32 or bfloat16. The result has that dtype too unless `dtype`
    asks for float32. float32 is multiplied in full precision on every platform. With "cpu" a row's
    result depends, bit for bit, on nothing but that row and the weight. Raises ValueError when
    shapes or dtypes do not fit.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x [M, K] {x.shape} and weight [N, K] {weight.shape} must have one depth")
    _check_dtypes(x, weight)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"dtype must be float32 or that of x ({x.dtype}), got {dtype}")
    return select("gemm", _GEMM, implementation)(x, weight, dtype=dtype)


def gemm_fp8(
    x: QuantizedRows,
    weight: QuantizedWeight,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """`gemm` of FP8 rows and an FP8 weight, summed in float32 and rounded to `dtype`.

    `dtype` is bfloat16 or float32. Raises ValueError when shapes or dtypes do not fit.
    """
    values, matrix = x.values, weight.values
    if values.ndim != 2 or matrix.ndim != 2 or values.shape[1] != matrix.shape[1]:
        raise ValueError(
            f"x [M, K] {values.shape} and weight [N, K] {matrix.shape} must have one depth"
        )
    (num_rows, depth), (num_out, _) = values.shape, matrix.shape
    blocks = num_scale_blocks(depth)
    for name, array, shape, wanted in (
        ("x.values", values, values.shape, jnp.float8_e4m3fn),
        ("x.scale", x.scale, (blocks, num_scale_rows(num_rows)), jnp.float32),
        ("weight.values", matrix, matrix.shape, jnp.float8_e4m3fn),
        ("weight.scale", weight.scale, (num_scale_blocks(num_out), blocks), jnp.float32),
    ):
        if array.shape != shape or array.dtype != wanted:
            raise ValueError(
                f"{name} must be {jnp.dtype(wanted)}{list(shape)}, got "
                f"{array.dtype}{list(array.shape)}"
            )
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype}")
    table = _FP8 if dtype == jnp.bfloat16 else _FP8_TO_F32
    return select(f"gemm_fp8(to {dtype})", table, implementation)(x, weight, dtype=dtype)


def gemm_by_head(
    x: Float[Array, "T N K"],
    weight: Float[Array, "N R C"],
    *,
    rows: tuple[int, int],
    transposed: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T N O"]:
    """Each head's vector times `rows[0] : rows[1]` of its matrix, summed in float32.

    `y[t, n, o] = sum_k x[t, n, k] * weight[n, rows[0] + o, k]`, O being the number of rows; with
    `transposed`, `y[t, n, o] = sum_k x[t, n, k] * weight[n, rows[0] + k, o]`, O being C.

    Rows are picked here, and not by slicing, so that a part of a weight is read where it lies.
    dtypes, precision and errors are as in `gemm`.
    """
    start, stop = rows
    if x.ndim != 3 or weight.ndim != 3 or x.shape[1] != weight.shape[0]:
        raise ValueError(
            f"x [T, N, K] {x.shape} and weight [N, R, C] {weight.shape} must have one number of "
            "heads N"
        )
    if not 0 <= start <= stop <= weight.shape[1]:
        raise ValueError(f"rows {rows} must lie within the {weight.shape[1]} rows of weight")
    depth = stop - start if transposed else weight.shape[2]
    if x.shape[2] != depth:
        raise ValueError(f"x [T, N, K] {x.shape} must have depth {depth} for rows {rows}")
    _check_dtypes(x, weight)
    function = select("gemm_by_head", _BY_HEAD, implementation)
    return function(x, weight, start=start, stop=stop, transposed=transposed)


def _check_dtypes(x: Array, weight: Array) -> None:
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"x and weight must both be float32 or both bfloat16, got {x.dtype} and {weight.dtype}"
        )
