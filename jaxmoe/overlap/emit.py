"""Tracing a schedule so that the compiled program keeps the order of its exchanges."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.overlap.schedule import EXCHANGE, Op, Schedule


def emit(schedule: Schedule, run: Callable[[Op, Array | None], Array], *, is_pinned: bool) -> None:
    """Trace the ops in order; `run` traces one and gives an array that it computes.

    Pinned, `run` is also given an array that is computed when the op before and the last exchange
    have run, for it to begin after. That is data flow, which no compiler can undo. (`control_deps`
    of jax 0.10 pins as well, but crashes with XLA's own collectives; `program_order` from 0.11 on
    takes fusions apart, which changes the last bits.)
    """
    before: Array | None = None
    exchanged: Array | None = None
    for op in schedule:
        after = [array for array in (before, exchanged) if array is not None]
        before = run(op, _join(after) if is_pinned and after else None)
        if op.stage in EXCHANGE:
            exchanged = before


def _join(arrays: Sequence[Array]) -> Array:
    """An array that is computed when all of these are."""
    return jnp.stack([array.ravel()[0].astype(jnp.float32) for array in arrays])
