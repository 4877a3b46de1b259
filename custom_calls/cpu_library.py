"""The C++ handlers of `csrc/` as callables. They are registered with JAX when it is
first asked whether they can be used."""

import functools
from typing import Any

import jax
from jaxtyping import Array

from custom_calls.varying import as_varying, shape_like, varying_axes


@functools.cache
def missing() -> str | None:
    """Why the handlers cannot be used, or None when they can."""
    try:
        from custom_calls import _cpu
    except ImportError as error:
        return f"custom_calls._cpu is not built ({error})"
    try:
        for target, handler in _cpu.registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform="cpu")
    except Exception as error:
        # Built against the headers of a newer jaxlib: XLA's own error type says so.
        return f"custom_calls._cpu does not fit this jaxlib, install again ({error})"
    return None


def call(
    target: str,
    results: tuple[jax.ShapeDtypeStruct, ...],
    *operands: Array,
    has_side_effect: bool = False,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> tuple[Array, ...]:
    """Calls a handler; usable inside `shard_map`. Without side effect it is a pure function.

    `aliases`: the operands, by number, that become results.
    """
    if (reason := missing()) is not None:
        raise RuntimeError(reason)
    axes = varying_axes(*operands)
    outputs = jax.ffi.ffi_call(
        target,
        tuple(shape_like(result.shape, result.dtype, *operands) for result in results),
        vmap_method="sequential",
        has_side_effect=has_side_effect,
        input_output_aliases=aliases,
    )(*(as_varying(operand, axes) for operand in operands), **attributes)
    return tuple(outputs)
