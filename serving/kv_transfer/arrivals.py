"""What comes to a decode worker's loop from prefill workers."""

import dataclasses
from typing import Protocol, TypeAlias, runtime_checkable

import jax
from jaxtyping import Float

from serving.request import Incoming, Request, TokenLogprob


@dataclasses.dataclass(frozen=True)
class ArrivedPages:
    """The request's pages from `first` on, the first `count` ones of `block`."""

    request: Request
    incoming: Incoming
    first: int
    count: int
    block: Float[jax.Array, "1 n L page_size latent"]


@dataclasses.dataclass(frozen=True)
class ArrivedToken:
    """All pages have arrived; this is what the prefill worker says besides.

    Attributes:
      prompt_logprobs: of the prompt's tokens from where they are wanted.
      cached_tokens: of the prompt, that the prefill worker did not have to compute.
      queue_seconds, prefill_seconds, transfer_seconds: what the time since it was asked went to.
    """

    request: Request
    incoming: Incoming
    token: TokenLogprob
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float


@dataclasses.dataclass(frozen=True)
class Lost:
    """They will not come, for this reason; `peer` is the prefill worker's address."""

    request: Request
    incoming: Incoming
    reason: str
    peer: str


Arrival: TypeAlias = ArrivedPages | ArrivedToken | Lost


@runtime_checkable
class Fetches(Protocol):
    """What the loop needs of `serving.kv_transfer.fetcher.Fetcher`; called on its thread."""

    def fetch(self, request: Request) -> None:
        """Ask for what the request's pages are to hold beyond `num_computed` tokens; sets
        `request.incoming`."""
        ...

    def arrivals(self) -> list[Arrival]:
        """What has come since this was asked last, in order."""
        ...

    def confirm(self, incoming: Incoming) -> None:
        """Everything has arrived and is in its pages."""
        ...
