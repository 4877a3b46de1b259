"""How the bytes of pages get from one worker's memory to the other's.

A worker has one `Backend`, of the same name on both sides. The prefill side turns a block into what
a `Pages` message says of it, a `Receiver` on the decode side turns that into a block on a device.
Control is not here: a receiver is only asked for what was sent.

- `socket`: the bytes follow the message on the same connection, from host memory to host memory.
- `jax`: `jax.experimental.transfer` pulls the block from device to device.
"""

import dataclasses
import itertools
import time
import zlib
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float

from serving.connection import format_address
from serving.kv_transfer.messages import Pages, TransferConnection


BACKENDS = ("socket", "jax")

POLL_SECONDS = 0.0005

Block = Float[jax.Array, "1 n L page_size latent"]


class TransferError(RuntimeError):
    """Pages did not arrive as they were sent; the connection goes on."""


@runtime_checkable
class Receiver(Protocol):
    def receive(
        self, connection: TransferConnection, pages: Pages, place: SingleDeviceSharding
    ) -> Block:
        """The block of a message.

        Raises TransferError, and OSError when the connection cannot go on.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    @property
    def port(self) -> int:
        """Where receivers reach it, 0 if they need not."""
        ...

    def send(self, connection: TransferConnection, pages: Pages, block: Block) -> int:
        """Send the message and the first `pages.count` pages of `block`; waits until the block has
        been computed, not for the network. Returns the number of bytes."""
        ...

    def receiver(self, host: str, port: int, block: jax.ShapeDtypeStruct) -> Receiver:
        """For the backend of this port there, whose blocks are such as `block`."""
        ...


def make_backend(name: str, host: str, *, checksums: bool, timeout: float) -> Backend:
    """Of BACKENDS; `host` is an address of this machine. With `checksums` they are sent along.
    Pages that do not come for `timeout` seconds are given up."""
    return SocketBackend(checksums) if name == "socket" else JaxBackend(host, checksums, timeout)


class SocketBackend:
    port = 0

    def __init__(self, checksums: bool):
        self._checksums = checksums

    def send(self, connection: TransferConnection, pages: Pages, block: Block) -> int:
        content = _bytes(block, pages.count)
        checksum = zlib.crc32(content) if self._checksums else None
        pages = dataclasses.replace(pages, num_bytes=content.nbytes, checksum=checksum)
        connection.send(pages, content)
        return content.nbytes

    def receiver(self, host: str, port: int, block: jax.ShapeDtypeStruct) -> Receiver:
        return _SocketReceiver(block)


class _SocketReceiver:
    def __init__(self, block: jax.ShapeDtypeStruct):
        self._block = block

    def receive(
        self, connection: TransferConnection, pages: Pages, place: SingleDeviceSharding
    ) -> Block:
        host = np.zeros(self._block.shape, self._block.dtype)
        content = _bytes(host, pages.count)
        if content.nbytes != pages.num_bytes:
            # What follows cannot be told apart from messages any more.
            raise OSError(f"{pages.count} pages have {content.nbytes} bytes, announced is {pages}")
        if not connection.receive_into(content):
            raise OSError("the connection ended between pages")
        _check(content, pages)
        return jax.device_put(host, place)


class JaxBackend:
    """Keeps a block until it is pulled. JAX has no way to take back what a receiver that is gone
    has not pulled: that memory is lost until the process ends."""

    def __init__(self, host: str, checksums: bool, timeout: float):
        where = format_address(host, 0)
        # Without an address for the transport a pull ends the connection (jax 0.10.2).
        self._server = transfer.start_transfer_server(jax.local_devices()[0].client, where, [where])
        self._keys = itertools.count()
        self._checksums = checksums
        self._timeout = timeout

    @property
    def port(self) -> int:
        return int(self._server.address().rpartition(":")[2])

    def send(self, connection: TransferConnection, pages: Pages, block: Block) -> int:
        jax.block_until_ready(block)
        key = next(self._keys)
        self._server.await_pull(key, [block])
        checksum = zlib.crc32(_bytes(block, pages.count)) if self._checksums else None
        connection.send(dataclasses.replace(pages, key=key, checksum=checksum))
        return block.nbytes

    def receiver(self, host: str, port: int, block: jax.ShapeDtypeStruct) -> Receiver:
        try:
            connection = self._server.connect(format_address(host, port))
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"no connection to {format_address(host, port)}: {error}") from error
        return _JaxReceiver(connection, block, self._timeout)


class _JaxReceiver:
    def __init__(
        self, puller: transfer.TransferConnection, block: jax.ShapeDtypeStruct, timeout: float
    ):
        self._puller = puller
        self._block = block
        self._timeout = timeout

    def receive(
        self, connection: TransferConnection, pages: Pages, place: SingleDeviceSharding
    ) -> Block:
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
            _check(_bytes(block, pages.count), pages)
        return block


def _bytes(block: Any, count: int) -> memoryview:
    """Of the first `count` pages, on the host."""
    return np.asarray(block)[0, :count].view(np.uint8).reshape(-1).data


def _check(content: memoryview, pages: Pages) -> None:
    if pages.checksum is not None and (found := zlib.crc32(content)) != pages.checksum:
        raise TransferError(
            f"pages {pages.first} to {pages.first + pages.count - 1} arrived with checksum "
            f"{found:08x}, sent was {pages.checksum:08x}"
        )
