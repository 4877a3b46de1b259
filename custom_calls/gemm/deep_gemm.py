"""`gemm_fp8` by DeepGEMM's dense kernel for Hopper. `tile` is for measuring other tiles than
the one that is chosen."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls.deep_gemm import library
from custom_calls.deep_gemm.kernel import Kernel
from custom_calls.deep_gemm.tiles import Layout, Problem, Tile, choose_tile
from custom_calls.layouts import QuantizedRows, QuantizedWeight


def gemm_fp8(
    x: QuantizedRows, weight: QuantizedWeight, *, dtype: jnp.dtype, tile: Tile | None = None
) -> Float[Array, "M N"]:
    (num_rows, depth), num_out = x.values.shape, weight.values.shape[0]
    library.check(num_out, depth, is_fp8=True, dtype=dtype)
    if 0 in (num_rows, num_out, depth):
        return jnp.zeros((num_rows, num_out), dtype)
    problem = Problem(True, Layout.DENSE, num_rows, 1, num_out, depth, library.num_sms())
    no_sizes = jnp.zeros((1,), jnp.int32)  # read by grouped kernels alone
    operands = (x.values, x.scale, weight.values, weight.scale, no_sizes)
    kernel = Kernel(problem, tile or choose_tile(problem))
    return library.call(kernel, (num_rows, num_out), *operands)
