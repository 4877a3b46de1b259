"""Choosing the implementation of an op.

Each op has a table from name to `Implementation`, the best one first. Asking for `None` takes the
first that can run; asking for a name takes that one or raises.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function, the platform it needs (None: any), and why it cannot run here (None: it can)."""

    function: Callable[..., Any]
    platform: str | None = None
    missing: Callable[[], str | None] = lambda: None


def select(op: str, table: Mapping[str, Implementation], name: str | None) -> Callable[..., Any]:
    """Returns the function of `table` to run for `op` on the default backend.

    Raises ValueError for a name that is not in the table, and RuntimeError for one that is but
    cannot run here, or when nothing in the table can.
    """
    if name is not None:
        if name not in table:
            raise ValueError(f"{op} has no implementation {name!r}; there are {list(table)}")
        reason = _why_not(table[name])
        if reason is not None:
            raise RuntimeError(f"{op}: {name!r} of {list(table)} cannot run: {reason}")
        return table[name].function

    for candidate, implementation in table.items():
        reason = _why_not(implementation)
        if reason is None:
            return implementation.function
        if implementation.platform == jax.default_backend():
            _log_once(f"{op} falls back from {candidate!r}: {reason}")
    raise RuntimeError(f"{op}: none of {list(table)} can run on {jax.default_backend()!r}")


def _why_not(implementation: Implementation) -> str | None:
    if implementation.platform not in (None, jax.default_backend()):
        return f"it needs {implementation.platform!r}, not {jax.default_backend()!r}"
    return implementation.missing()


@functools.cache
def _log_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
