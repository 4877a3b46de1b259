"""Pages by NIXL, which moves them between registered memory with what UCX finds: RDMA between
hosts, shared memory within one, or TCP.

The sender copies pages into one of a few slots of a registered host buffer, and says in `Pages.key`
where; the receiver reads that into a registered buffer of its own and copies it to its device. A
slot is free again once NIXL notifies that it has been read. Everything belongs to one connection,
an agent on each side too, and goes with it, so a receiver that is gone leaves nothing behind.

On GPUs the blocks themselves could be registered and read from device to device, without these
copies. That is not done here.
"""

import base64
import contextlib
import dataclasses
import importlib.util
import logging
import math
import secrets
import threading
import time
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from serving.kv_transfer.backends import POLL_SECONDS, Block, Receiver, Sender, bytes_of, check
from serving.kv_transfer.messages import Pages, TransferConnection


NUM_SLOTS = 4
"""Blocks that may be on their way to one receiver."""

READ_POLL_SECONDS = 0.0001  # a block takes one to ten milliseconds

SEAL_BYTES = 32
"""At the end of a slot: the name of the sender's agent, until the sender closes."""


def check_installed() -> None:
    """Raises ValueError."""
    if importlib.util.find_spec("nixl_cu13") is None:
        raise ValueError(
            "the transfer backend nixl needs the package nixl-cu13, which is not installed: "
            "`pip install jaxmoe[nixl]`"
        )


class NixlBackend:
    def __init__(self, block: jax.ShapeDtypeStruct, checksums: bool, timeout: float):
        self._block = block
        self._checksums = checksums
        self._timeout = timeout

    def sender(self, connection: TransferConnection) -> Sender:
        return _NixlSender(connection, self._block, self._checksums, self._timeout)

    def receiver(self, connection: TransferConnection, host: str, endpoint: str) -> Receiver:
        return _NixlReceiver(endpoint, self._block, self._timeout)


class _NixlSender(Sender):
    """`endpoint` is the agent's metadata, which says how to reach it and its memory."""

    def __init__(
        self,
        connection: TransferConnection,
        block: jax.ShapeDtypeStruct,
        checksums: bool,
        timeout: float,
    ):
        self._connection = connection
        self._checksums = checksums
        self._timeout = timeout
        self._memory = _Memory(block, NUM_SLOTS)
        self._memory.seals[:] = np.frombuffer(self._memory.name, np.uint8)
        with _as_os_errors():
            metadata = self._memory.agent.get_agent_metadata()
        self.endpoint = base64.b64encode(metadata).decode()
        self._num_sent = 0
        self._num_read = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="kv-nixl", daemon=True)
        self._watcher.start()

    def send(self, pages: Pages, block: Block) -> int:
        content = bytes_of(block, pages.count)
        with self._changed:
            if not self._changed.wait_for(self._has_free_slot, self._timeout):
                raise OSError(f"no pages were read for {self._timeout:g} s")
        slot = self._num_sent % NUM_SLOTS  # they are read in the order in which they are sent
        self._memory.slots[slot, : content.nbytes] = content
        with self._changed:
            self._num_sent += 1
            self._changed.notify()
        checksum = zlib.crc32(content) if self._checksums else None
        key = self._memory.address(slot)
        self._connection.send(dataclasses.replace(pages, key=key, checksum=checksum))
        return content.nbytes

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._watcher.join()
        # A message that is read only now must not turn what comes to lie there into pages.
        self._memory.seals[:] = 0
        self._memory.close()

    def _has_free_slot(self) -> bool:
        return self._num_sent - self._num_read < NUM_SLOTS

    def _has_work(self) -> bool:
        return self._is_closed or self._num_sent > self._num_read

    def _watch(self) -> None:
        """Let NIXL go on with what receivers do, while there is something to be read. Its own
        thread for this takes an eighth of a core for each agent, whatever happens (1.5.1)."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_closed:
                    return
                self._num_read += self._memory.num_notified()
                self._changed.notify()
            time.sleep(POLL_SECONDS)


class _NixlReceiver(Receiver):
    def __init__(self, endpoint: str, block: jax.ShapeDtypeStruct, timeout: float):
        self._block = block
        self._timeout = timeout
        self._memory = _Memory(block, 1)
        with _as_os_errors():
            self._sender = self._memory.agent.add_remote_agent(base64.b64decode(endpoint))

    def receive(self, pages: Pages, place: SingleDeviceSharding) -> Block:
        # A copy, since a block on a CPU may share its memory, also if told not to (jax 0.10.2).
        host = np.zeros(self._block.shape, self._block.dtype)
        content = bytes_of(host, pages.count)
        self._read(pages.key, content.nbytes)
        if self._memory.seals.tobytes() != self._sender:
            raise OSError("the pages were taken back before they were read")
        content[:] = self._memory.slots[0, : content.nbytes].data
        check(content, pages)
        return jax.device_put(host, place)

    def close(self) -> None:
        self._memory.close()

    def _read(self, address: int, num_bytes: int) -> None:
        agent, here = self._memory.agent, self._memory.address(0)
        deadline = time.monotonic() + self._timeout
        with _as_os_errors():
            read = agent.initialize_xfer(
                "READ",
                self._memory.parts(here, num_bytes),
                self._memory.parts(address, num_bytes),
                self._sender,
                b"read",
            )
            state = agent.transfer(read)
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise OSError(f"pages did not come for {self._timeout:g} s")
                time.sleep(READ_POLL_SECONDS)
                state = agent.check_xfer_state(read)
            agent.release_xfer_handle(read)
        if state != "DONE":
            raise OSError(f"pages could not be read: {state}")


class _Memory:
    """Registered slots, each for a block and a seal, and the agent that they belong to."""

    def __init__(self, block: jax.ShapeDtypeStruct, num_slots: int):
        from nixl_cu13 import (  # pyright: ignore[reportMissingImports]
            nixl_agent,
            nixl_agent_config,
        )

        logging.getLogger("nixl").setLevel(logging.WARNING)  # else it tells of every agent
        block_bytes = math.prod(block.shape) * block.dtype.itemsize
        name = secrets.token_hex(SEAL_BYTES // 2)
        self.name = name.encode()
        self.slots = np.zeros((num_slots, block_bytes + SEAL_BYTES), np.uint8)
        self.seals = self.slots[:, block_bytes:]
        with _as_os_errors():
            self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
            self._registered = self.agent.register_memory(
                [(self.slots.ctypes.data, self.slots.nbytes, 0, "")], "DRAM"
            )

    def address(self, slot: int) -> int:
        return self.slots[slot].ctypes.data

    def parts(self, address: int, num_bytes: int):
        """Of a slot there or in the other side's memory: so much of the block, and the seal."""
        seal = address + self.slots.shape[1] - SEAL_BYTES
        return self.agent.get_xfer_descs([(address, num_bytes, 0), (seal, SEAL_BYTES, 0)], "DRAM")

    def num_notified(self) -> int:
        """Reads that have ended since this was asked last."""
        with _as_os_errors():
            return sum(map(len, self.agent.get_new_notifs().values()))

    def close(self) -> None:
        with _as_os_errors():
            self.agent.deregister_memory(self._registered)
        del self.agent


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """NIXL's exceptions have no class in common."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"NIXL: {type(error).__name__}: {error}") from error
