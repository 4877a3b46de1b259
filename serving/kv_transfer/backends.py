"""How the bytes of pages get from one worker's memory to the other's.

A worker has one `Backend`, of the same name on both sides. On each connection a `Sender` on the
prefill side turns blocks into what `Pages` messages say of them, and a `Receiver` on the decode
side turns that into blocks on a device, in the same order. Control is not here: a receiver is only
asked for what was sent.

- `socket`: the bytes follow the message on the same connection, from host memory to host memory.
- `jax`: `jax.experimental.transfer` pulls the block from device to device.
- `nixl`: see `serving.kv_transfer.nixl`, which needs an extra of the package.
"""

import dataclasses
import itertools
import time
import zlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float

from serving.connection import format_address
from serving.kv_transfer.messages import Pages, TransferConnection


BACKENDS = ("socket", "jax", "nixl")

POLL_SECONDS = 0.0005

Block = Float[jax.Array, "1 n L page_size latent"]


class TransferError(RuntimeError):
    """Pages did not arrive as they were sent; the connection goes on."""


@runtime_checkable
class Sender(Protocol):
    endpoint: str
    """What the backend on the other side makes its receiver of."""

    def send(self, pages: Pages, block: Block) -> int:
        """Send the message and the first `pages.count` pages of `block`; waits until the block has
        been computed, and for a receiver only when it is far behind. Returns the number of bytes.

        Raises OSError when the connection cannot go on.
        """
        ...

    def close(self) -> None:
        """The connection has ended."""


@runtime_checkable
class Receiver(Protocol):
    def receive(self, pages: Pages, place: SingleDeviceSharding) -> Block:
        """The block of a message.

        Raises TransferError, and OSError when the connection cannot go on.
        """
        ...

    def close(self) -> None:
        """The connection has ended."""


@runtime_checkable
class Backend(Protocol):
    def sender(self, connection: TransferConnection) -> Sender:
        """Raises OSError when there can be none."""
        ...

    def receiver(self, connection: TransferConnection, host: str, endpoint: str) -> Receiver:
        """For the sender at the other end of the connection, on that host, with that endpoint.

        Raises OSError when it cannot be reached.
        """
        ...


def make_backend(
    name: str, host: str, block: jax.ShapeDtypeStruct, *, checksums: bool, timeout: float
) -> Backend:
    """Of BACKENDS, for blocks such as `block`; `host` is an address of this machine. With
    `checksums` they are sent along. Pages that do not come for `timeout` seconds are given up."""
    match name:
        case "socket":
            return SocketBackend(block, checksums)
        case "jax":
            return JaxBackend(host, block, checksums, timeout)
        case _:
            from serving.kv_transfer.nixl import NixlBackend  # which imports this module

            return NixlBackend(block, checksums, timeout)


class SocketBackend:
    def __init__(self, block: jax.ShapeDtypeStruct, checksums: bool):
        self._block = block
        self._checksums = checksums

    def sender(self, connection: TransferConnection) -> Sender:
        return _SocketSender(connection, self._checksums)

    def receiver(self, connection: TransferConnection, host: str, endpoint: str) -> Receiver:
        return _SocketReceiver(connection, self._block)


class _SocketSender(Sender):
    endpoint = ""

    def __init__(self, connection: TransferConnection, checksums: bool):
        self._connection = connection
        self._checksums = checksums

    def send(self, pages: Pages, block: Block) -> int:
        content = bytes_of(block, pages.count)
        checksum = zlib.crc32(content) if self._checksums else None
        pages = dataclasses.replace(pages, num_bytes=content.nbytes, checksum=checksum)
        self._connection.send(pages, content)
        return content.nbytes


class _SocketReceiver(Receiver):
    def __init__(self, connection: TransferConnection, block: jax.ShapeDtypeStruct):
        self._connection = connection
        self._block = block

    def receive(self, pages: Pages, place: SingleDeviceSharding) -> Block:
        host = np.zeros(self._block.shape, self._block.dtype)
        content = bytes_of(host, pages.count)
        if content.nbytes != pages.num_bytes:
            # What follows cannot be told apart from messages any more.
            raise OSError(f"{pages.count} pages have {content.nbytes} bytes, announced is {pages}")
        if not self._connection.receive_into(content):
            raise OSError("the connection ended between pages")
        check(content, pages)
        return jax.device_put(host, place)


class JaxBackend:
    """Keeps a block until it is pulled. JAX has no way to take back what a receiver that is gone
    has not pulled: that memory is lost until the process ends."""

    def __init__(self, host: str, block: jax.ShapeDtypeStruct, checksums: bool, timeout: float):
        where = format_address(host, 0)
        # Without an address for the transport a pull ends the connection (jax 0.10.2).
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, where, [where])
        self._keys = itertools.count()
        self._block = block
        self._checksums = checksums
        self._timeout = timeout

    def sender(self, connection: TransferConnection) -> Sender:
        return _JaxSender(connection, self._server, self._keys, self._checksums)

    def receiver(self, connection: TransferConnection, host: str, endpoint: str) -> Receiver:
        address = format_address(host, int(endpoint))
        try:
            puller = self._server.connect(address)
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"no connection to {address}: {error}") from error
        return _JaxReceiver(puller, self._block, self._timeout)


class _JaxSender(Sender):
    """`endpoint` is the server's port."""

    def __init__(
        self,
        connection: TransferConnection,
        server: transfer.TransferServer,
        keys: Iterator[int],
        checksums: bool,
    ):
        self.endpoint = server.address().rpartition(":")[2]
        self._connection = connection
        self._server = server
        self._keys = keys
        self._checksums = checksums

    def send(self, pages: Pages, block: Block) -> int:
        jax.block_until_ready(block)
        key = next(self._keys)
        self._server.await_pull(key, [block])
        checksum = zlib.crc32(bytes_of(block, pages.count)) if self._checksums else None
        self._connection.send(dataclasses.replace(pages, key=key, checksum=checksum))
        return block.nbytes


class _JaxReceiver(Receiver):
    def __init__(
        self, puller: transfer.TransferConnection, block: jax.ShapeDtypeStruct, timeout: float
    ):
        self._puller = puller
        self._block = block
        self._timeout = timeout

    def receive(self, pages: Pages, place: SingleDeviceSharding) -> Block:
        wanted = jax.ShapeDtypeStruct(self._block.shape, self._block.dtype, sharding=place)
        deadline = time.monotonic() + self._timeout
        try:
            [block] = self._puller.pull(pages.key, [wanted])
            while not block.is_ready():  # its own timeout does not end a pull (jax 0.10.2)
                if time.monotonic() > deadline:
                    raise OSError(f"pages did not come for {self._timeout:g} s")
                time.sleep(POLL_SECONDS)
            jax.block_until_ready(block)
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"pages could not be pulled: {error}") from error
        if pages.checksum is not None:
            check(bytes_of(block, pages.count), pages)
        return block


def bytes_of(block: Any, count: int) -> memoryview:
    """Of the first `count` pages, on the host."""
    return np.asarray(block)[0, :count].view(np.uint8).reshape(-1).data


def check(content: memoryview, pages: Pages) -> None:
    """Raises TransferError when it is not what was sent."""
    if pages.checksum is not None and (found := zlib.crc32(content)) != pages.checksum:
        raise TransferError(
            f"pages {pages.first} to {pages.first + pages.count - 1} arrived with checksum "
            f"{found:08x}, sent was {pages.checksum:08x}"
        )
