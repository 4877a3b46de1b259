"""How the members of a group find each other: member 0 listens, the others connect.

Each says who it is and what it runs; member 0 welcomes them when all are there, or refuses one in
words. The order in which they are started does not matter.
"""

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Mapping

from serving.connection import Connection, format_address
from serving.wire import CODEC, Hello, MemberConnection, Refusal, Welcome


logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 300.0
RETRY_SECONDS = 0.2
MAX_HELLO_BYTES = 1 << 16


class Rendezvous:
    """Member 0's side: a port, taken at once, where the others are awaited.

    Raises ValueError when the port cannot be had.
    """

    def __init__(self, host: str, port: int):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
        except OSError as error:
            self._listener.close()
            raise ValueError(f"cannot listen on {format_address(host, port)}: {error}") from error
        self._listener.listen()

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._listener.close()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.getsockname()[:2]

    def gather(
        self,
        nnodes: int,
        fingerprint: Mapping[str, str],
        group_name: str,
        *,
        timeout: float = TIMEOUT_SECONDS,
    ) -> list[MemberConnection]:
        """Connections to members 1, 2, ..., all welcomed.

        Raises TimeoutError naming the node ranks that did not come in time.
        """
        with contextlib.closing(_Gathering(self._listener, nnodes, fingerprint)) as gathering:
            deadline = time.monotonic() + timeout
            while gathering.missing:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(
                        f"node ranks {', '.join(map(str, gathering.missing))} of {nnodes} did not "
                        f"connect to {format_address(*self.address)} within {timeout:g} s"
                    )
                gathering.advance(remaining)
            connections = [Connection(member, CODEC) for member in gathering.take_members()]
        for connection in connections:
            connection.send(Welcome(group_name))
        return connections


class _Gathering:
    """Those who have connected so far. One that leaves again makes room for its successor."""

    def __init__(self, listener: socket.socket, nnodes: int, fingerprint: Mapping[str, str]):
        self._listener = listener
        self._nnodes = nnodes
        self._fingerprint = fingerprint
        self._heard: dict[socket.socket, bytes] = {}
        self._members: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(1, self._nnodes) if rank not in self._members]

    def take_members(self) -> list[socket.socket]:
        """In order of rank; they are the caller's from now on."""
        members = [self._members[rank] for rank in sorted(self._members)]
        for member in members:
            self._selector.unregister(member)
            del self._heard[member]
        return members

    def close(self) -> None:
        for connected in list(self._heard):
            connected.close()
        self._selector.close()

    def advance(self, timeout: float) -> None:
        """Take in what has arrived, or wait this long for something."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                connected, _ = self._listener.accept()
                self._heard[connected] = b""
                self._selector.register(connected, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)

    def _hear(self, connected: socket.socket) -> None:
        try:
            data = connected.recv(MAX_HELLO_BYTES)
        except OSError:
            data = b""
        if not data:
            self._drop(connected)
            return
        self._heard[connected] += data
        if len(self._heard[connected]) > MAX_HELLO_BYTES:
            self._refuse(connected, f"a hello must be shorter than {MAX_HELLO_BYTES} bytes")
        elif data.endswith(b"\n"):
            self._greet(connected)

    def _greet(self, connected: socket.socket) -> None:
        try:
            hello = CODEC.decode(self._heard[connected])
        except ValueError as error:
            self._refuse(connected, f"that is no message: {error}")
            return
        if not isinstance(hello, Hello):
            self._refuse(connected, f"the first message must be hello, got {hello.kind}")
        elif reason := self._objection(hello):
            self._refuse(connected, reason)
        else:
            self._members[hello.node_rank] = connected
            logger.info("node rank %d of %d has connected", hello.node_rank, self._nnodes)

    def _objection(self, hello: Hello) -> str | None:
        if hello.nnodes != self._nnodes:
            return f"--nnodes is {hello.nnodes} there and {self._nnodes} on node rank 0"
        if not 1 <= hello.node_rank < self._nnodes:
            return (
                f"--node-rank must be between 1 and {self._nnodes - 1} on a node that connects, "
                f"got {hello.node_rank}"
            )
        if hello.node_rank in self._members:
            return f"node rank {hello.node_rank} is taken by another node"
        theirs, ours = hello.fingerprint, self._fingerprint
        differing = [
            f"{key} is {theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here"
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key)
        ]
        if differing:
            return f"all nodes must run the same, but {'; '.join(differing)} (node rank 0)"
        return None

    def _refuse(self, connected: socket.socket, reason: str) -> None:
        logger.warning("refused %s: %s", connected.getpeername(), reason)
        with contextlib.suppress(OSError):
            connected.sendall(CODEC.encode(Refusal(reason)))
        self._drop(connected)

    def _drop(self, connected: socket.socket) -> None:
        self._selector.unregister(connected)
        del self._heard[connected]
        for rank, member in list(self._members.items()):
            if member is connected:
                del self._members[rank]
        connected.close()


def join(
    address: tuple[str, int], hello: Hello, *, timeout: float = TIMEOUT_SECONDS
) -> tuple[MemberConnection, Welcome]:
    """Connect to member 0, which may still have to start.

    Raises ValueError with the reason when it refuses, TimeoutError when it is not reached, or does
    not answer, in time.
    """
    deadline = time.monotonic() + timeout
    where = format_address(*address)
    reason = "nobody has answered"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            connected = socket.create_connection(address, timeout=remaining)
        except OSError as error:
            reason = str(error)
        else:
            with contextlib.ExitStack() as stack:
                stack.enter_context(connected)
                line = _ask(connected, hello, deadline)
                if line.endswith(b"\n"):
                    answer = CODEC.decode(line)
                    if isinstance(answer, Refusal):
                        raise ValueError(f"refused by node rank 0 at {where}: {answer.reason}")
                    if isinstance(answer, Welcome):
                        stack.pop_all()
                        return Connection(connected, CODEC), answer
                    raise ValueError(f"node rank 0 at {where} answered hello with {answer.kind}")
                reason = "no answer before the connection or the time ended"
        time.sleep(max(0.0, min(RETRY_SECONDS, deadline - time.monotonic())))
    raise TimeoutError(f"not admitted by node rank 0 at {where} within {timeout:g} s: {reason}")


def _ask(connected: socket.socket, hello: Hello, deadline: float) -> bytes:
    """The line that answers, less of it when the connection ends or time is up."""
    line = b""
    # The system can connect a socket that asks for a free local port to itself.
    if connected.getsockname() == connected.getpeername():
        return line
    with contextlib.suppress(OSError):
        connected.sendall(CODEC.encode(hello))
        while not line.endswith(b"\n"):
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            # Byte by byte: what follows the line is for `Connection` to read.
            byte = connected.recv(1)
            if not byte:
                break
            line += byte
    return line
