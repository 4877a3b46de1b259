"""Member 0's front: the loops of all members look like one `ServingLoop` to the HTTP layer.

Requests go to the member with the fewest, and their outputs come back over its connection. The
members' loops step together, so when one is gone, all end. `serving.member` is the other side.
"""

import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from serving.lockstep import Record
from serving.loop import QueueFullError, ServingLoop
from serving.request import Output, Request
from serving.wire import (
    CODEC,
    Abort,
    AskMetrics,
    MemberConnection,
    Message,
    Metrics,
    NewRequest,
    Progress,
    Shutdown,
    State,
    Submit,
)


logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class _Placed:
    """An unfinished request and the member that serves it."""

    request: Request
    member: int


@dataclasses.dataclass
class _Remote:
    """Another member, as far as it is known here."""

    member: int
    connection: MemberConnection
    state: State = dataclasses.field(default_factory=State)
    num_sent: int = 0
    is_gone: bool = False
    metrics: dict[int, Future[str]] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"member {self.member} at {self.connection.peer}"

    @property
    def num_waiting(self) -> int:
        """Those on their way included."""
        return self.state.num_waiting + self.num_sent - self.state.num_received


class MemberGroup:
    """Thread-safe front of all members: `loop` is this one's, not yet started; `connections` lead
    to members 1, 2, ....

    At most `max_queued` requests wait in all of them; the loops' own bounds must not be smaller.
    """

    def __init__(
        self, loop: ServingLoop, connections: Sequence[MemberConnection], *, max_queued: int
    ):
        self._loop = loop
        self._max_queued = max_queued
        self._remotes = [
            _Remote(member, connection) for member, connection in enumerate(connections, 1)
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(remote,), name=remote.name, daemon=True)
            for remote in self._remotes
        ]
        self._numbers = itertools.count()
        # The lock guards all below and the remotes; a loop's own lock is taken inside it, never
        # the other way round.
        self._changed = threading.Condition()
        self._placed: dict[str, _Placed] = {}
        self._accepting = True
        self._stopping = False
        self._error: str | None = None

    def start(self) -> None:
        self._loop.watch(self._watch_own_loop)
        self._loop.start()
        for reader in self._readers:
            reader.start()

    @property
    def error(self) -> str | None:
        return self._error or self._loop.error

    @property
    def is_accepting(self) -> bool:
        return self._accepting

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._num_waiting()

    @property
    def num_running(self) -> int:
        with self._changed:
            remotes = sum(r.state.num_running for r in self._remotes if not r.is_gone)
        return self._loop.num_running + remotes

    def submit(self, requests: list[Request]) -> None:
        """Take in all of these requests or none; raises what `ServingLoop.submit` does."""
        with self._changed:
            self._check(requests)
            placed = self._place(requests)
            lines = {
                member: CODEC.encode(
                    Submit([NewRequest(r.rid, r.prompt_ids, r.params) for r in of_it])
                )
                for member, of_it in placed.items()
                if member != 0
            }
            # Known here before any output can come.
            for member, of_it in placed.items():
                self._placed.update((r.rid, _Placed(r, member)) for r in of_it)
            try:
                if own := placed.get(0):
                    self._loop.submit(
                        [dataclasses.replace(r, sink=partial(self._deliver, r.rid)) for r in own]
                    )
            except Exception:
                for request in requests:
                    del self._placed[request.rid]
                raise
            for member, line in lines.items():
                remote = self._remotes[member - 1]
                remote.num_sent += len(placed[member])
                remote.connection.send_line(line)

    def abort(self, rid: str) -> bool:
        """End this request; False when there is none of this id."""
        with self._changed:
            return self._abort([rid]) == 1

    def abort_all(self) -> int:
        """End every request; how many there were."""
        with self._changed:
            return self._abort(list(self._placed))

    def flush_cache(self) -> None:
        """Forget everything cached, on all members. Raises RuntimeError while any serves a
        request."""
        if self.error is not None:
            raise RuntimeError(f"the serving loop has stopped: {self.error}")
        self._loop.flush_cache()  # its members agree on it

    def record(self, what: Record) -> list[str]:
        """As `ServingLoop.record`; each member writes a file in its own directory."""
        if self.error is not None:
            raise RuntimeError(f"the serving loop has stopped: {self.error}")
        return self._loop.record(what)  # its members agree on it

    def shutdown(self, drain_timeout: float = 0.0) -> None:
        """Take no more requests; those under way may finish for this many seconds. Then all members
        end."""
        with self._changed:
            self._accepting = False
            self._changed.wait_for(
                lambda: not self._placed or self.error is not None, timeout=drain_timeout
            )
            self._abort(list(self._placed))
            self._stopping = True
            for remote in self._remotes:
                remote.connection.send(Shutdown())
        self._loop.shutdown()
        for remote, reader in zip(self._remotes, self._readers, strict=True):
            reader.join(SHUTDOWN_SECONDS)
            if reader.is_alive():
                logger.warning("%s does not end its connection", remote.name)
                remote.connection.finish()
                reader.join(SHUTDOWN_SECONDS)

    def member_metrics(self, timeout: float = 2.0) -> dict[int, str]:
        """The other members' metrics in Prometheus' text format, of those that answer in time."""
        number = next(self._numbers)
        answers: dict[int, Future[str]] = {}
        with self._changed:
            for remote in self._remotes:
                if not remote.is_gone:
                    answers[remote.member] = remote.metrics[number] = Future()
                    remote.connection.send(AskMetrics(number))
        done, _ = wait(answers.values(), timeout)
        with self._changed:
            for remote in self._remotes:
                remote.metrics.pop(number, None)
        return {
            member: answer.result()
            for member, answer in answers.items()
            if answer in done and answer.exception() is None
        }

    # With the lock held.

    def _num_waiting(self) -> int:
        remotes = sum(remote.num_waiting for remote in self._remotes if not remote.is_gone)
        return self._loop.num_waiting + remotes

    def _check(self, requests: list[Request]) -> None:
        if self.error is not None:
            raise RuntimeError(f"the serving loop has stopped: {self.error}")
        if not self._accepting:
            raise RuntimeError("the server is shutting down")
        num_waiting = self._num_waiting()
        if num_waiting + len(requests) > self._max_queued:
            raise QueueFullError(
                f"{num_waiting} requests are waiting and {self._max_queued} may; "
                f"{len(requests)} more do not fit"
            )
        seen = set(self._placed)
        for request in requests:
            if request.rid in seen:
                raise ValueError(f"rid {request.rid!r} is in use by another request")
            seen.add(request.rid)

    def _place(self, requests: list[Request]) -> dict[int, list[Request]]:
        """Each to the member that has the fewest then, the lowest of those."""
        counts = [0] * (1 + len(self._remotes))
        for placed in self._placed.values():
            counts[placed.member] += 1
        members: dict[int, list[Request]] = {}
        for request in requests:
            member = min(range(len(counts)), key=lambda member: (counts[member], member))
            counts[member] += 1
            members.setdefault(member, []).append(request)
        return members

    def _abort(self, rids: list[str]) -> int:
        known = [rid for rid in rids if rid in self._placed]
        for rid in known:
            if self._placed[rid].member == 0:
                self._loop.abort(rid)
        for remote in self._remotes:
            if of_it := [rid for rid in known if self._placed[rid].member == remote.member]:
                remote.connection.send(Abort(of_it))
        return len(known)

    # On the readers' and the loop's threads.

    def _read(self, remote: _Remote) -> None:
        reason = "its connection ended"
        try:
            while (message := remote.connection.receive()) is not None:
                self._take(remote, message)
        except ValueError as error:
            reason = f"it sent what is no message: {error}"
        self._lose(remote, reason)
        remote.connection.close()

    def _take(self, remote: _Remote, message: Message) -> None:
        match message:
            case Progress():
                self._deliver(message.rid, message.output)
            case State():
                with self._changed:
                    remote.state = message
            case Metrics():
                with self._changed:
                    answer = remote.metrics.pop(message.number, None)
                if answer is not None:
                    answer.set_result(message.text)
            case _:
                raise ValueError(f"{message.kind} is not for a front")

    def _deliver(self, rid: str, output: Output) -> None:
        """Hand an output to its request; a client that is gone must not stop the others."""
        with self._changed:
            placed = self._placed.get(rid)
            if output.finish_reason is not None:
                self._placed.pop(rid, None)
                self._changed.notify_all()
        if placed is None:
            return
        try:
            placed.request.sink(output)
        except Exception:
            logger.exception("the sink of request %s failed", rid)

    def _lose(self, remote: _Remote, reason: str) -> None:
        """Nothing more comes from this member; without it no other can step."""
        message = f"{remote.name} is gone: {remote.state.error or reason}"
        with self._changed:
            remote.is_gone = True
            expected = self._stopping
            if not expected and self.error is None:
                self._error = message
            lost = [rid for rid, placed in self._placed.items() if placed.member == remote.member]
            for answer in remote.metrics.values():
                answer.set_exception(RuntimeError(message))
            remote.metrics.clear()
            self._changed.notify_all()
        for rid in lost:
            self._deliver(rid, Output(finish_reason="error", error=message))
        if not expected:
            logger.error("%s", message)
            self._loop.abandon(message)

    def _watch_own_loop(self) -> None:
        if self._loop.error is not None:
            for remote in self._remotes:
                remote.connection.send(State(error=self._loop.error))
                remote.connection.finish()
