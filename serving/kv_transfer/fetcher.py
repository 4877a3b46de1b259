"""The decode worker's side: asks prefill workers for caches and brings them to the loop.

Each prefill worker that requests name has a link, a connection with a thread, from the first
request on until it ends; the next request makes a new one. Nothing here blocks the loop.
"""

import contextlib
import dataclasses
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from jax.sharding import SingleDeviceSharding

from serving.connection import parse_address
from serving.kv_transfer.arrivals import Arrival, ArrivedPages, ArrivedToken, Lost
from serving.kv_transfer.backends import Backend, Receiver, TransferError
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
from serving.request import Incoming, Request


logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
TICK_SECONDS = 0.2


@dataclasses.dataclass(eq=False)
class _Transfer:
    """A request's pages on their way. `next_page` is the first one that has not come."""

    number: int
    request: Request
    link: "_Link"
    place: SingleDeviceSharding
    next_page: int
    num_pages: int
    started: float

    def cancel(self) -> None:
        self.link.end(self, tell=Cancel(self.number))


class Fetcher:
    """Fetches what requests need from the prefill workers they name.

    Args:
      hello: what is said to each of them first.
      place_of: where the blocks of a rank must be.
      pages_for: how many pages so many tokens take.
      timeout: seconds after which a transfer that is not over has failed.
      wake: called when something has arrived.
    """

    def __init__(
        self,
        hello: Hello,
        backend: Backend,
        place_of: Callable[[int], SingleDeviceSharding],
        page_size: int,
        *,
        timeout: float,
        wake: Callable[[], None],
    ):
        self.counts = TransferCounts()
        self.hello = hello
        self.backend = backend
        self.place_of = place_of
        self._page_size = page_size
        self._timeout = timeout
        self._wake = wake
        self._numbers = itertools.count()
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kv-deadlines", daemon=True)
        self._watcher.start()

    # On the loop's thread; `Fetches` says what they do.

    def fetch(self, request: Request) -> None:
        assert request.prefill_address is not None
        first, rest = divmod(request.num_computed, self._page_size)
        assert rest == 0, "pages are held whole"
        while True:
            link = self._link(request.prefill_address)
            transfer = _Transfer(
                next(self._numbers), request, link, self.place_of(request.rank), first,
                len(request.pages), time.monotonic(),
            )  # fmt: skip
            request.incoming = transfer
            params = dataclasses.replace(
                request.params, prompt_logprobs=request.next_prompt_logprob is not None
            )
            message = Prefill(
                transfer.number, request.rid, request.prompt_ids, list(request.output_ids), params,
                first,
            )  # fmt: skip
            if link.begin(transfer, message):
                self.counts.begin()
                return

    def arrivals(self) -> list[Arrival]:
        arrivals = []
        with contextlib.suppress(queue.Empty):
            while True:
                arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def confirm(self, incoming: Incoming) -> None:
        assert isinstance(incoming, _Transfer)
        incoming.link.end(incoming, tell=Done(incoming.number))
        self.counts.succeed(time.monotonic() - incoming.started)

    def close(self) -> None:
        """End all connections. The loop has ended."""
        self._closing.set()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()
        self._watcher.join()

    # On the links' and the watcher's threads.

    def arrive(self, arrival: Arrival) -> None:
        if isinstance(arrival, Lost):
            self.counts.fail()
        self._arrivals.put(arrival)
        self._wake()

    def forget(self, link: "_Link") -> None:
        with self._lock:
            if self._links.get(link.address) is link:
                del self._links[link.address]

    def _link(self, address: str) -> "_Link":
        with self._lock:
            if (link := self._links.get(address)) is None:
                link = self._links[address] = _Link(address, self)
            return link

    def _watch(self) -> None:
        last_ping = 0.0
        while not self._closing.wait(TICK_SECONDS):
            now = time.monotonic()
            with self._lock:
                links = list(self._links.values())
            for link in links:
                link.expire(now - self._timeout, f"not done within {self._timeout:g} s")
            if now - last_ping >= PING_SECONDS:
                last_ping = now
                for link in links:
                    link.ping()


class _Link:
    """A connection to one prefill worker, for as long as it lasts."""

    def __init__(self, address: str, fetcher: Fetcher):
        self.address = address
        self._fetcher = fetcher
        self._lock = threading.Lock()
        self._transfers: dict[int, _Transfer] = {}
        self._unsent: list[Prefill] = []
        self._connection: TransferConnection | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name=f"kv from {address}", daemon=True)
        self._thread.start()

    def begin(self, transfer: _Transfer, message: Prefill) -> bool:
        """Ask for a transfer as soon as there is a connection; False when this one has ended."""
        with self._lock:
            if self._has_ended:
                return False
            self._transfers[transfer.number] = transfer
            if self._connection is None:
                self._unsent.append(message)
            else:
                self._connection.send(message)
        return True

    def end(self, transfer: _Transfer, tell: Cancel | Done | None = None) -> bool:
        """Nothing more of it is taken; False when it was over already."""
        with self._lock:
            if self._transfers.pop(transfer.number, None) is None:
                return False
            self._unsent = [m for m in self._unsent if m.transfer != transfer.number]
            if tell is not None and self._connection is not None:
                self._connection.send(tell)
        return True

    def expire(self, started_before: float, reason: str) -> None:
        with self._lock:
            late = [t for t in self._transfers.values() if t.started < started_before]
        for transfer in late:
            self._lose(transfer, reason, tell=Cancel(transfer.number))

    def ping(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.send(Ping())

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.finish()
        self._thread.join(CONNECT_SECONDS)

    def _lose(self, transfer: _Transfer, reason: str, tell: Cancel | None = None) -> None:
        if self.end(transfer, tell):
            reason = f"the prefill worker at {self.address}: {reason}"
            self._fetcher.arrive(Lost(transfer.request, transfer, reason, self.address))

    def _run(self) -> None:
        reason = "its connection ended"
        try:
            connection = self._connect()
        except (OSError, ValueError) as error:
            reason = str(error)
            logger.warning("no connection to the prefill worker at %s: %s", self.address, reason)
        else:
            try:
                self._serve(connection)
            except (OSError, ValueError) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("the connection to %s has failed", self.address)
                reason = f"{type(error).__name__}: {error}"
            logger.info("the connection to %s has ended: %s", self.address, reason)
            connection.close()
        self._fetcher.forget(self)
        with self._lock:
            self._has_ended = True
            transfers = list(self._transfers.values())
        for transfer in transfers:
            self._lose(transfer, reason)

    def _connect(self) -> TransferConnection:
        address = parse_address(self.address)
        connected = socket.create_connection(address, timeout=CONNECT_SECONDS)
        return TransferConnection(connected, CODEC, silence=SILENCE_SECONDS)

    def _serve(self, connection: TransferConnection) -> None:
        """Until the connection ends. Raises OSError and ValueError when that is why."""
        fetcher = self._fetcher
        connection.send(fetcher.hello)
        answer = connection.receive()
        if isinstance(answer, Refusal):
            raise ValueError(f"it refuses: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ValueError(f"it answered hello with {answer and answer.kind}")
        host, _ = parse_address(self.address)
        receiver = fetcher.backend.receiver(connection, host, answer.endpoint)
        with contextlib.closing(receiver):
            with self._lock:
                self._connection = connection
                unsent, self._unsent = self._unsent, []
                for message in unsent:
                    connection.send(message)
            self._listen(connection, receiver)

    def _listen(self, connection: TransferConnection, receiver: Receiver) -> None:
        while (message := connection.receive()) is not None:
            match message:
                case Pages():
                    self._take_pages(receiver, message)
                case Prefilled():
                    self._take_token(message)
                case Failed():
                    if transfer := self._transfers.get(message.transfer):
                        self._lose(transfer, message.reason)
                case Ping():
                    pass
                case _:
                    raise ValueError(f"{message.kind} is not for a decode worker")

    def _take_pages(self, receiver: Receiver, pages: Pages) -> None:
        transfer = self._transfers.get(pages.transfer)
        # Also when nobody wants them any more: they are under way.
        place = self._fetcher.place_of(0) if transfer is None else transfer.place
        try:
            block = receiver.receive(pages, place)
        except TransferError as error:
            if transfer is not None:
                self._lose(transfer, str(error), tell=Cancel(transfer.number))
            return
        if transfer is None:
            return
        self._fetcher.counts.move(block.nbytes // block.shape[1] * pages.count, pages.count)
        stop = pages.first + pages.count
        if pages.first != transfer.next_page or stop > transfer.num_pages:
            reason = f"pages {pages.first} to {stop - 1} came, {transfer.next_page} was next"
            self._lose(transfer, reason, tell=Cancel(transfer.number))
            return
        transfer.next_page = stop
        self._fetcher.arrive(
            ArrivedPages(transfer.request, transfer, pages.first, pages.count, block)
        )

    def _take_token(self, message: Prefilled) -> None:
        transfer = self._transfers.get(message.transfer)
        if transfer is None:
            return
        if transfer.next_page != transfer.num_pages:
            reason = f"{transfer.next_page} of {transfer.num_pages} pages came"
            self._lose(transfer, reason, tell=Cancel(transfer.number))
            return
        there = message.queue_seconds + message.prefill_seconds
        self._fetcher.arrive(
            ArrivedToken(
                transfer.request,
                transfer,
                message.token,
                tuple(message.prompt_logprobs),
                message.cached_tokens,
                message.queue_seconds,
                message.prefill_seconds,
                max(0.0, time.monotonic() - transfer.started - there),
            )
        )
