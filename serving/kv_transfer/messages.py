"""What decode and prefill workers tell each other. `transfer` is the asker's number of a transfer,
its own on each connection."""

import dataclasses
from typing import Literal, TypeAlias

from serving.connection import Codec, Connection
from serving.request import SamplingParams, TokenLogprob


PING_SECONDS = 5.0
SILENCE_SECONDS = 2 * PING_SECONDS
"""A peer that has said nothing for so long is gone."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """The decode worker's first words. `fingerprint` is what must be equal on both sides.

    `context_length`: of the longest sequence it may ask for.
    """

    fingerprint: dict[str, str]
    context_length: int
    kind: Literal["hello"] = "hello"


@dataclasses.dataclass(frozen=True)
class Welcome:
    """`endpoint` is that of the backend's sender."""

    endpoint: str
    kind: Literal["welcome"] = "welcome"


@dataclasses.dataclass(frozen=True)
class Refusal:
    reason: str
    kind: Literal["refusal"] = "refusal"


@dataclasses.dataclass(frozen=True)
class Ping:
    """Both sides say it every `PING_SECONDS`."""

    kind: Literal["ping"] = "ping"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Compute these tokens and the next one, and send the pages after the first `num_held` ones.

    `output_ids` were generated before, by a request whose pages others needed.
    """

    transfer: int
    rid: str
    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    num_held: int
    kind: Literal["prefill"] = "prefill"


@dataclasses.dataclass(frozen=True)
class Cancel:
    transfer: int
    kind: Literal["cancel"] = "cancel"


@dataclasses.dataclass(frozen=True)
class Done:
    """Everything has arrived."""

    transfer: int
    kind: Literal["done"] = "done"


@dataclasses.dataclass(frozen=True)
class Pages:
    """The next pages of a request.

    Attributes:
      first, count: which; the pages are counted from the start of the sequence.
      num_bytes: that follow this message.
      key: what the backend knows them by, if they do not follow.
      checksum: CRC-32 of the pages' bytes, if such are sent.
    """

    transfer: int
    first: int
    count: int
    num_bytes: int = 0
    key: int = 0
    checksum: int | None = None
    kind: Literal["pages"] = "pages"


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """All pages are sent. See `ArrivedToken`."""

    transfer: int
    token: TokenLogprob
    prompt_logprobs: list[TokenLogprob]
    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    kind: Literal["prefilled"] = "prefilled"


@dataclasses.dataclass(frozen=True)
class Failed:
    transfer: int
    reason: str
    kind: Literal["failed"] = "failed"


Message = (
    Hello
    | Welcome
    | Refusal
    | Ping
    | Prefill
    | Cancel
    | Done
    | Pages
    | Prefilled
    | Failed
)  # fmt: skip

CODEC: Codec[Message] = Codec(Message)

TransferConnection: TypeAlias = Connection[Message]
