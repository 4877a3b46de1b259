"""A connection of two processes that carries messages, and bytes that belong to them.

A message is one line of JSON, an object whose `kind` says which of a codec's types it is. Whoever
reaches a port is believed, so it belongs in a trusted network.
"""

import contextlib
import logging
import queue
import socket
import struct
import threading
from typing import Annotated, Any, Generic, TypeVar

import pydantic


logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 28
CLOSE_SECONDS = 5.0


M = TypeVar("M")


class Codec(Generic[M]):
    """Turns messages, of the types of a union, into lines and back."""

    def __init__(self, union: Any):
        tagged: Any = Annotated[union, pydantic.Field(discriminator="kind")]
        self._adapter: pydantic.TypeAdapter[M] = pydantic.TypeAdapter(
            tagged,
            # Log-probabilities may be -inf.
            config=pydantic.ConfigDict(ser_json_inf_nan="constants"),
        )

    def encode(self, message: M) -> bytes:
        """The message's line. Raises ValueError for text that is not valid Unicode."""
        return self._adapter.dump_json(message) + b"\n"

    def decode(self, line: bytes) -> M:
        """Raises ValueError for what is no message."""
        return self._adapter.validate_json(line)


class Connection(Generic[M]):
    """A connected socket that carries messages; it belongs to this object from now on.

    Any thread may send, one receives and closes. With `silence`, the connection has ended for the
    receiver when nothing has arrived for so many seconds.
    """

    def __init__(self, connected: socket.socket, codec: Codec[M], *, silence: float | None = None):
        host, port = connected.getpeername()[:2]
        self.peer = format_address(host, port)
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished says nothing; the system asks it now and then.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if silence is not None:  # of receiving alone: a long send is no silence
            limit = struct.pack("ll", int(silence), int(silence % 1 * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket = connected
        self._codec = codec
        self._reader = connected.makefile("rb")
        self._lines: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"to {self.peer}", daemon=True)
        self._writer.start()

    def send(self, message: M, content: memoryview | None = None) -> None:
        """Never waits for the network. What is sent to a peer that is gone is lost.

        The receiver reads `content` with `receive_into`. Only one thread may send some.
        """
        self.send_line(self._codec.encode(message))
        if content is not None:
            self._lines.put(content)

    def send_line(self, line: bytes) -> None:
        """`send` of what the codec's `encode` gave."""
        self._lines.put(line)

    def receive(self) -> M | None:
        """The next message, None when the connection has ended. Raises ValueError for what is no
        message."""
        try:
            line = self._reader.readline(MAX_LINE_BYTES)
        except OSError:
            return None
        if len(line) == MAX_LINE_BYTES:
            raise ValueError(f"a message must be shorter than {MAX_LINE_BYTES} bytes")
        return self._codec.decode(line) if line.endswith(b"\n") else None

    def receive_into(self, content: memoryview) -> bool:
        """Fill it with the bytes that follow a message; False when the connection has ended."""
        while content:
            try:
                count = self._reader.readinto(content)
            except OSError:
                return False
            if not count:
                return False
            content = content[count:]
        return True

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


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, an IPv6 host in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ValueError(f"must be HOST:PORT with a port between 1 and 65535, got {text}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
