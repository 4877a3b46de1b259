"""Triton kernels without a GPU: `triton_interpreted` is Triton's interpreter, on numpy."""

import contextlib
import importlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from custom_calls import triton_library
from custom_calls.permute import api as permute_api
from custom_calls.quantize import api as quantize_api
from custom_calls.select import Implementation


@pytest.fixture
def implementation(request, monkeypatch):
    """The name to ask an op for. Without parameter, the test is not about implementations."""
    name = request.param
    if name == "triton" and jax.default_backend() != "gpu":
        pytest.skip("needs a CUDA GPU")
    if name == "cpu" and jax.default_backend() != "cpu":
        pytest.skip("the handlers are for the CPU backend")
    if name != "triton_interpreted":
        yield name
        return
    pytest.importorskip("triton", reason="Triton's interpreter needs triton")
    pytest.importorskip("torch", reason="Triton's interpreter needs torch")
    for api in (permute_api, quantize_api):
        for table in vars(api).values():
            if isinstance(table, dict) and isinstance(table.get("triton"), Implementation):
                here = Implementation(table["triton"].function)
                monkeypatch.setitem(table, "triton", here)
    monkeypatch.setattr(triton_library, "call", _interpret)
    with jax.disable_jit():
        yield "triton"


def _interpret(kernel, *operands, results, grid, num_warps, **constants):
    """`triton_library.call`; what the kernel leaves alone is full of ones bits (NaN, or -1)."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction

    inputs = [np.array(operand) for operand in operands]
    outputs = [np.empty(result.shape, result.dtype) for result in results]
    for output in outputs:
        output.reshape(-1).view(np.uint8)[:] = 0xFF

    def tensor(array):
        if array.dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
            words = torch.from_numpy(array.view(f"u{array.itemsize}"))
            return words.view(getattr(torch, array.dtype.name))
        return torch.from_numpy(array)

    # A GPU does not warn.
    with _interpretable(kernel), np.errstate(all="ignore"):
        run = InterpretedFunction(kernel.fn).run
        run(*map(tensor, (*inputs, *outputs)), grid=grid, warmup=False, **constants)
    return tuple(jnp.asarray(output) for output in outputs)


@contextlib.contextmanager
def _interpretable(kernel):
    """Lets an interpreted kernel call other functions for GPUs: its module's, `tl.sum` and such."""
    # Imported by the first launch otherwise, and confused by what is done below.
    importlib.import_module("triton.experimental.gluon")
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    own = sys.modules[kernel.fn.__module__]
    places = [own, tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype]
    # Interpreted functions that call others leave the language patched.
    before = [(place, dict(vars(place))) for place in places]
    convert = interpreter._convert_float
    try:
        for module in (own, tl, tl.standard):
            for name, value in dict(vars(module)).items():
                if isinstance(value, JITFunction):
                    setattr(module, name, interpreter.InterpretedFunction(value.fn))
        interpreter._convert_float = _convert_float
        yield
    finally:
        interpreter._convert_float = convert
        for place, members in before:
            for name, value in members.items():
                if vars(place).get(name) is not value:
                    setattr(place, name, value)


def _convert_float(bits, source, target, rounding_mode):
    """The interpreter's own rounds halves away from zero and loses carries into the exponent."""
    dtypes = {"bf16": jnp.bfloat16, "fp32": np.float32, "fp8e4nv": ml_dtypes.float8_e4m3fn}
    with np.errstate(invalid="ignore"):
        numbers = bits.view(dtypes[source.name]).astype(np.float32).astype(dtypes[target.name])
    return numbers.view(f"u{numbers.itemsize}")
