"""The prefill worker's side: takes what decode workers ask for to the loop, and sends the results.

A decode worker has one connection, with a thread that listens to it and one that sends: copies of
pages wait there until they are computed, so the loop goes on at once.
"""

import contextlib
import logging
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Float

from serving.kv_transfer.backends import Backend, Sender
from serving.kv_transfer.counts import TransferCounts
from serving.kv_transfer.messages import (
    CODEC,
    PING_SECONDS,
    SILENCE_SECONDS,
    Cancel,
    Done,
    Failed,
    Hello,
    Pages,
    Ping,
    Prefill,
    Prefilled,
    Refusal,
    TransferConnection,
    Welcome,
)
from serving.loop import ServingLoop
from serving.request import Output, Request, TokenLogprob


logger = logging.getLogger(__name__)

INJECTED = "injected failure"


class PrefillServer:
    """Serves `loop`'s prompts to the decode workers that connect to `listener`.

    Args:
      hello: what theirs must agree with; its context length is the longest sequence here.
      failure_probability: of a transfer, to fail somewhere on its way; for tests.
    """

    def __init__(
        self,
        loop: ServingLoop,
        listener: socket.socket,
        hello: Hello,
        backend: Backend,
        *,
        failure_probability: float = 0.0,
    ):
        self.loop = loop
        self.hello = hello
        self.backend = backend
        self.counts = TransferCounts()
        self.failure_probability = failure_probability
        self._listener = listener
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._accept, name="kv-accept", daemon=True),
            threading.Thread(target=self._ping, name="kv-ping", daemon=True),
        ]

    def start(self) -> None:
        self._listener.listen()
        for thread in self._threads:
            thread.start()

    @property
    def num_unconfirmed(self) -> int:
        """Transfers that are not over."""
        return sum(client.num_transfers for client in self._all())

    def close(self) -> None:
        """End all connections, once what is to be sent has been sent."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the one who waits there
        self._listener.close()
        for client in self._all():
            client.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def forget(self, client: "_Client") -> None:
        with self._lock:
            self._clients.discard(client)

    def objection(self, hello: Hello) -> str | None:
        """Why nothing can be done for a decode worker, None if it can."""
        theirs, ours = hello.fingerprint, self.hello.fingerprint
        differing = [
            f"{key} is {theirs.get(key, 'absent')} there and {ours.get(key, 'absent')} here"
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key)
        ]
        if differing:
            return f"prefill and decode workers must agree, but {'; '.join(differing)}"
        if hello.context_length > self.hello.context_length:
            return (
                f"the context length of a decode worker ({hello.context_length}) must not exceed "
                f"that of a prefill worker ({self.hello.context_length})"
            )
        return None

    def _all(self) -> list["_Client"]:
        with self._lock:
            return list(self._clients)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                client = _Client(
                    self, TransferConnection(connected, CODEC, silence=SILENCE_SECONDS)
                )
                self._clients.add(client)
            client.start()

    def _ping(self) -> None:
        while not self._closing.wait(PING_SECONDS):
            for client in self._all():
                client.ping()


class _Client:
    """A decode worker that has connected."""

    def __init__(self, server: PrefillServer, connection: TransferConnection):
        self.server = server
        self.connection = connection
        self.sender: Sender | None = None  # once it is welcome
        self._lock = threading.Lock()
        self._transfers: dict[int, _Sending] = {}
        self._unsent: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listening = threading.Thread(
            target=self._listen, name=f"kv for {connection.peer}", daemon=True
        )
        self._sending = threading.Thread(
            target=self._send, name=f"kv to {connection.peer}", daemon=True
        )

    def start(self) -> None:
        self._sending.start()
        self._listening.start()

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    def has(self, number: int) -> bool:
        return number in self._transfers

    def put(self, send: Callable[[], None]) -> None:
        """Let this be called after what was put before."""
        self._unsent.put(send)

    def end(self, number: int) -> "_Sending | None":
        """Let a transfer be over; None when it was."""
        with self._lock:
            return self._transfers.pop(number, None)

    def ping(self) -> None:
        if self.sender is not None:  # the answer to hello comes first
            self.connection.send(Ping())

    def close(self) -> None:
        self.put(self.connection.finish)
        self._listening.join()

    def _send(self) -> None:
        while (send := self._unsent.get()) is not None:
            try:
                send()
            except Exception:
                logger.exception("cannot send to %s", self.connection.peer)
                self.connection.finish()
                return

    def _listen(self) -> None:
        reason = "it ended"
        try:
            if self._greet():
                while (message := self.connection.receive()) is not None:
                    self._take(message)
        except (OSError, ValueError) as error:
            reason = str(error)
        except Exception as error:
            logger.exception("the connection of %s has failed", self.connection.peer)
            reason = f"{type(error).__name__}: {error}"
        logger.info("the connection of the decode worker %s: %s", self.connection.peer, reason)
        self.server.forget(self)
        with self._lock:
            transfers = list(self._transfers.values())
        for transfer in transfers:
            if self.end(transfer.number) is not None:
                self.server.counts.fail()
                self.server.loop.abort(transfer.rid)
        self._unsent.put(None)
        self._sending.join()
        if self.sender is not None:
            self.sender.close()
        self.connection.close()

    def _greet(self) -> bool:
        hello = self.connection.receive()
        if not isinstance(hello, Hello):
            raise ValueError(f"the first message must be hello, got {hello and hello.kind}")
        if (reason := self.server.objection(hello)) is not None:
            logger.warning("refused %s: %s", self.connection.peer, reason)
            self.connection.send(Refusal(reason))
            return False
        sender = self.server.backend.sender(self.connection)
        self.connection.send(Welcome(sender.endpoint))
        self.sender = sender
        logger.info("decode worker %s has connected", self.connection.peer)
        return True

    def _take(self, message: object) -> None:
        match message:
            case Prefill():
                self._begin(message)
            case Cancel():
                if (transfer := self.end(message.transfer)) is not None:
                    self.server.loop.abort(transfer.rid)
            case Done():
                if (transfer := self.end(message.transfer)) is not None:
                    self.server.counts.succeed(time.monotonic() - transfer.started)
            case Ping():
                pass
            case _:
                raise ValueError(f"{message} is not for a prefill worker")

    def _begin(self, message: Prefill) -> None:
        transfer = _Sending(self, message)
        with self._lock:
            self._transfers[message.transfer] = transfer
        self.server.counts.begin()
        try:
            self.server.loop.submit([transfer.request(message)])
        except (RuntimeError, ValueError) as error:  # the queue is full, or it is shutting down
            transfer.fail(str(error))


class _Sending:
    """A request's pages on their way to the decode worker that has asked for them (`Outgoing`)."""

    def __init__(self, client: _Client, message: Prefill):
        self.number = message.transfer
        # Several decode workers may use the same id.
        self.rid = f"{client.connection.peer}/{message.transfer}/{message.rid}"
        self.num_sent = message.num_held
        self.started = time.monotonic()
        self._client = client
        self._messages_to_failure: int | None = None
        if random.random() < client.server.failure_probability:
            self._messages_to_failure = random.randrange(3)

    def request(self, message: Prefill) -> Request:
        return Request(
            self.rid,
            message.prompt_ids,
            message.params,
            self._take,
            output_ids=message.output_ids,
            outgoing=self,
        )

    def fail(self, reason: str) -> None:
        if self._client.end(self.number) is not None:
            self._client.server.counts.fail()
            self._client.put(lambda: self._client.connection.send(Failed(self.number, reason)))

    # On the loop's thread.

    def send(self, count: int, block: Float[jax.Array, "1 n L page_size latent"]) -> None:
        pages = Pages(self.number, self.num_sent, count)
        self.num_sent += count
        if not self._fails_now():
            self._client.put(partial(self._send, pages, block))

    def finish(
        self,
        request: Request,
        token: TokenLogprob,
        *,
        queue_seconds: float,
        prefill_seconds: float,
    ) -> None:
        message = Prefilled(
            self.number, token, list(request.prompt_logprobs), request.cached_tokens or 0,
            queue_seconds, prefill_seconds,
        )  # fmt: skip
        if not self._fails_now():
            self._client.put(lambda: self._client.connection.send(message))

    def _take(self, output: Output) -> None:
        """The request's last output, of the loop here."""
        if output.finish_reason == "error":
            self.fail(output.error or "the request failed")
        elif output.finish_reason == "abort":
            self.fail("it was aborted on the prefill worker")

    def _send(self, pages: Pages, block: Float[jax.Array, "1 n L page_size latent"]) -> None:
        if self._client.has(self.number):  # else nobody waits for them any more
            assert self._client.sender is not None
            num_bytes = self._client.sender.send(pages, block)
            self._client.server.counts.move(num_bytes, pages.count)

    def _fails_now(self) -> bool:
        if self._messages_to_failure == 0:
            self.fail(INJECTED)
            self._client.server.loop.abort(self.rid)
            return True
        if self._messages_to_failure is not None:
            self._messages_to_failure -= 1
        return False
