"""What members tell each other: messages, and the connection they go over.

A message is one line of JSON, an object whose `kind` says which of the types below it is. Member 0
has a connection to each other member. Whoever reaches the port is believed, so it belongs in a
trusted network.
"""

import contextlib
import dataclasses
import logging
import queue
import socket
import threading
from typing import Annotated, Literal

import pydantic

from serving.request import Output, SamplingParams


logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 28
CLOSE_SECONDS = 5.0


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

_MESSAGE: pydantic.TypeAdapter[Message] = pydantic.TypeAdapter(
    Annotated[Message, pydantic.Field(discriminator="kind")],
    # Log-probabilities may be -inf.
    config=pydantic.ConfigDict(ser_json_inf_nan="constants"),
)


def encode(message: Message) -> bytes:
    """The message's line. Raises ValueError for text that is not valid Unicode."""
    return _MESSAGE.dump_json(message) + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError for what is no message."""
    return _MESSAGE.validate_json(line)


class Connection:
    """A connected socket that carries messages; it belongs to this object from now on.

    Any thread may send, one receives and closes.
    """

    def __init__(self, connected: socket.socket):
        host, port = connected.getpeername()[:2]
        self.peer = format_address(host, port)
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished says nothing; the system asks it now and then.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connected
        self._reader = connected.makefile("rb")
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to {self.peer}", daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        """Never waits for the network. What is sent to a peer that is gone is lost."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """`send` of what `encode` gave."""
        self._lines.put(line)

    def receive(self) -> Message | None:
        """The next message, None when the connection has ended. Raises ValueError for what is no
        message."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES)
        except OSError:
            return None
        if len(line) == MAX_LINE_BYTES:
            raise ValueError(f"a message must be shorter than {MAX_LINE_BYTES} bytes")
        return decode(line) if line.endswith(b"\n") else None

    def finish(self) -> None:
        """End the connection, on both sides, once everything is sent; does not wait for that."""
        self._lines.put(None)

    def close(self) -> None:
        self.finish()
        self._writer.join(CLOSE_SECONDS)
        with contextlib.suppress(OSError):  # wakes a writer whose peer does not read
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join()
        self._reader.close()
        self._socket.close()

    def _write(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._socket.sendall(line)
        except OSError as error:
            logger.debug("cannot send to %s: %s", self.peer, error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
