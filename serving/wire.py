"""What the members of a group tell each other; member 0 has a connection to each other member."""

import dataclasses
from typing import Literal, TypeAlias

from serving.connection import Codec, Connection
from serving.request import Output, SamplingParams


@dataclasses.dataclass(frozen=True)
class Hello:
    """A member's first words. `fingerprint` is what must be equal on all members."""

    node_rank: int
    nnodes: int
    fingerprint: dict[str, str]
    kind: Literal["hello"] = "hello"


@dataclasses.dataclass(frozen=True)
class Welcome:
    """All members are there. `group_name` is what they know their group by."""

    group_name: str
    kind: Literal["welcome"] = "welcome"


@dataclasses.dataclass(frozen=True)
class Refusal:
    reason: str
    kind: Literal["refusal"] = "refusal"


@dataclasses.dataclass(frozen=True)
class NewRequest:
    rid: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Submit:
    requests: list[NewRequest]
    kind: Literal["submit"] = "submit"


@dataclasses.dataclass(frozen=True)
class Abort:
    rids: list[str]
    kind: Literal["abort"] = "abort"


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """End the loop together with all others, then the connection."""

    kind: Literal["shutdown"] = "shutdown"


@dataclasses.dataclass(frozen=True)
class AskMetrics:
    number: int
    kind: Literal["ask_metrics"] = "ask_metrics"


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The answer to the question of this number, in Prometheus' text format."""

    number: int
    text: str
    kind: Literal["metrics"] = "metrics"


@dataclasses.dataclass(frozen=True)
class Progress:
    """An output of a request."""

    rid: str
    output: Output
    kind: Literal["progress"] = "progress"


@dataclasses.dataclass(frozen=True)
class State:
    """Where a member's requests are, sent when that changes.

    Attributes:
      num_received: requests submitted to it so far; later ones are not in the other counts.
      error: why its loop has died.
    """

    num_received: int = 0
    num_waiting: int = 0
    num_running: int = 0
    error: str | None = None
    kind: Literal["state"] = "state"


Message = (
    Hello
    | Welcome
    | Refusal
    | Submit
    | Abort
    | Shutdown
    | AskMetrics
    | Metrics
    | Progress
    | State
)  # fmt: skip

CODEC: Codec[Message] = Codec(Message)

MemberConnection: TypeAlias = Connection[Message]
