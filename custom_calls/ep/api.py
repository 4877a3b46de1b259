"""How tokens reach their experts and come back, with DeepEP's semantics. Local shapes.

Two modes. Normal: a token goes once to each rank that holds one of its experts, exact counts,
contiguous layout; for many tokens. Low latency: a token goes once for each of its experts, into a
slab with room for all, masked layout; for few tokens. Each has one token layout, so that it can
only meet its own grouped GEMM.

`dispatch` then `combine`, each split where data is under way, so that other work can be put in
between: `_start` packs and sends, `_finish` unpacks. What is under way, and a handle, are plain
arrays: XLA sees them as data flow.

Law: with identity experts and weights that sum to one, combine(dispatch(x)) == x.
"""

import dataclasses
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Array, Float, Float32, Int32

from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedRows
from custom_calls.quantize import quantize_rows


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)


@dataclasses.dataclass(frozen=True)
class DispatchOutput(Generic[Tokens]):
    """Tokens in expert order, and what it takes to send the results back."""

    tokens: Tokens
    handle: Any


@runtime_checkable
class Dispatcher(Protocol):
    """A mode of a backend. Of one dispatcher, a call must have come back before the next begins.

    `after`: the call begins when this array has been computed, too.
    """

    def rank(self) -> Int32[Array, ""]:
        """This device's rank among all that exchange tokens."""
        ...

    def dispatch_start(
        self,
        x: Float[Array, "T H"],
        topk_idx: Int32[Array, "T K"],
        topk_weights: Float32[Array, "T K"],
        *,
        after: Array | None = None,
    ) -> Any:
        """Send tokens to physical experts; -1 is none.

        An expert lives on rank idx // slots_per_rank.
        """
        ...

    def dispatch_finish(self, in_flight: Any, *, after: Array | None = None) -> DispatchOutput:
        """The arrived tokens by local expert, in each in an order of the dispatcher's own."""
        ...

    def combine_start(self, y: Any, handle: Any) -> Any:
        """Send the experts' results, in the layout and order in which their tokens came, back."""
        ...

    def combine_finish(
        self, in_flight: Any, handle: Any, *, after: Array | None = None
    ) -> Float[Array, "T H"]:
        """Each token's results, weighed and added up; a token that went nowhere gets zeros."""
        ...


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What all dispatchers are made of.

    Attributes:
      axis_name: the mesh axis of this process's devices.
      slots_per_rank: physical experts of a rank.
      alignment: experts' rows start, and slabs end, at a multiple of it.
      fp8: tokens are quantised before they are sent, and arrive with their scales.
      permute, quantize: implementations of `custom_calls.permute` and `custom_calls.quantize`,
        None for the best.
      channel: dispatchers whose calls may overlap have different ones (micro-batches).
    """

    axis_name: str
    slots_per_rank: int
    alignment: int = 1
    fp8: bool = False
    permute: str | None = None
    quantize: str | None = None
    channel: int = 0

    def quantized(self, x: Float[Array, "T H"]) -> Float[Array, "T H"] | QuantizedRows:
        """The tokens as they are sent."""
        return quantize_rows(x, implementation=self.quantize) if self.fp8 else x
