"""The CUDA handlers of `csrc/` and the kernels this process has given them."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from custom_calls.deep_gemm import compiler
from custom_calls.deep_gemm.kernel import Kernel
from custom_calls.varying import as_varying, shape_like, varying_axes


COMPUTE_CAPABILITY = "9.0"


@functools.cache
def missing() -> str | None:
    """Why DeepGEMM cannot be used, or None when it can."""
    try:
        from custom_calls import _cuda
    except ImportError as error:
        return f"custom_calls._cuda is not built, CUDA's headers were not found ({error})"
    if reason := _cuda.missing():
        return f"the CUDA driver cannot be used: {reason}"
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        if capability != COMPUTE_CAPABILITY:
            return f"the kernels are for compute capability 9.0, {device} has {capability}"
    toolchain = compiler.find_toolchain()
    if isinstance(toolchain, str):
        return toolchain
    for target, handler in _cuda.deep_gemm_registrations().items():
        jax.ffi.register_ffi_target(target, handler, platform="CUDA")
    return None


def num_sms() -> int:
    """Multiprocessors of a local device."""
    return jax.local_devices()[0].core_count


def check(num_out: int, depth: int, *, is_fp8: bool, dtype: jnp.dtype) -> None:
    """Raises ValueError for what no kernel can multiply: TMA wants multiples of 16 bytes a row."""
    if dtype != jnp.bfloat16:
        raise ValueError(f"'deep_gemm' multiplies to bfloat16, got {dtype}")
    multiple = 16 if is_fp8 else 8
    if depth % multiple or num_out % 8:
        raise ValueError(
            f"'deep_gemm' needs K to be a multiple of {multiple} in {'fp8' if is_fp8 else 'bf16'} "
            f"and N of 8, got K {depth} and N {num_out}"
        )


def announce(kernel: Kernel) -> None:
    """Programs that need the kernel wait for `register` or `fail` when they are compiled."""
    from custom_calls import _cuda

    _cuda.announce_deep_gemm_kernel(kernel.id)


def register(kernel: Kernel, cubin: bytes) -> None:
    """Load a kernel on every local device."""
    from custom_calls import _cuda

    _cuda.register_deep_gemm_kernel(kernel.id, cubin, is_fp8=kernel.problem.is_fp8, **kernel.launch)


def fail(kernel: Kernel, error: str) -> None:
    """Programs that need the kernel fail with this text."""
    from custom_calls import _cuda

    _cuda.fail_deep_gemm_kernel(kernel.id, error)


def call(kernel: Kernel, shape: tuple[int, ...], *operands: Array) -> Array:
    """The kernel's result, bfloat16 of this shape; usable inside `shard_map`."""
    compiler.request(kernel)
    kind = "fp8" if kernel.problem.is_fp8 else "bf16"
    axes = varying_axes(*operands)
    return jax.ffi.ffi_call(
        f"jaxmoe_cuda_deep_gemm_{kind}",
        shape_like(shape, jnp.bfloat16, *operands),
        vmap_method="sequential",
    )(*(as_varying(operand, axes) for operand in operands), kernel=kernel.id)


def launches() -> dict[str, int]:
    """Calls of the handlers since the process started, by kind and layout ("fp8_masked").

    "captured" are those of them that recorded a command buffer; replays of it are not counted.
    """
    from custom_calls import _cuda

    return dict(_cuda.deep_gemm_launches())


def host_nanoseconds() -> int:
    """Host time spent in these calls."""
    from custom_calls import _cuda

    return _cuda.deep_gemm_host_nanoseconds()
