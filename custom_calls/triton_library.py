"""Triton kernels inside XLA programs, through jax-triton (github.com/jax-ml/jax-triton).

Kernels lie in modules named `triton`, which are imported when one of their functions first runs:
Triton takes a second to import, and may not be there. A kernel takes pointers to its operands, then
to its results, then constants; that shapes are constants costs nothing, XLA compiles for one shape
anyway, and tells Triton how far addresses are aligned.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
from jaxtyping import Array

from custom_calls.select import Implementation
from custom_calls.varying import as_varying, varying_axes


def implementation(module: str, name: str) -> Implementation:
    """The function `name` of a module of Triton kernels as an implementation of an op."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return Implementation(run, "gpu", missing)


@functools.cache
def missing() -> str | None:
    """Why kernels cannot be compiled, or None when they can. It does not ask for a GPU."""
    for name in ("triton", "jax_triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax_triton cannot be imported ({error})"
    return None


def call(
    kernel: Any,
    *operands: Array,
    results: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    num_warps: int,
    **constants: Any,
) -> tuple[Array, ...]:
    """Runs a kernel once for each point of the grid; usable inside `shard_map`.

    What the kernel does not write of its results is unspecified. Products and sums are rounded one
    by one, as in plain JAX on CPU, so that results can be compared bit by bit.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    jax_triton = importlib.import_module("jax_triton")
    outputs = jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_shape=results,
        grid=grid,
        num_warps=num_warps,
        enable_fp_fusion=False,
        name=kernel.__name__,
        **constants,
    )
    axes = varying_axes(*operands)
    return tuple(as_varying(output, axes) for output in outputs)
