"""What must not be computed before something else. Local shapes."""

import jax
from jaxtyping import Array

from custom_calls import cpu_library


def hold_until(x: Array, after: Array | None) -> Array:
    """`x`, for what may only be computed from it once `after`, if there is one, has been computed.

    XLA drops `optimization_barrier` before it schedules a program for CPUs, hence a handler there.
    """
    if after is None:
        return x
    if jax.default_backend() != "cpu":
        return jax.lax.optimization_barrier((x, after))[0]
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    (held,) = cpu_library.call("jaxmoe_hold_until", (result,), x, after, aliases={0: 0})
    return held
