"""A member other than 0: its loop serves what member 0's front, `serving.front`, hands it."""

import logging
import threading
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest

from serving.loop import ServingLoop
from serving.request import Output, Request
from serving.wire import (
    Abort,
    AskMetrics,
    MemberConnection,
    Message,
    Metrics,
    Progress,
    Shutdown,
    State,
    Submit,
)


logger = logging.getLogger(__name__)

ABANDON_SECONDS = 5.0


class MemberLink:
    """Joins `loop`, not yet started, to the front at the other end of `connection`.

    `registry` is what the front shows of this member.
    """

    def __init__(
        self, loop: ServingLoop, connection: MemberConnection, registry: CollectorRegistry
    ):
        self._loop = loop
        self._connection = connection
        self._registry = registry
        self._lock = threading.Lock()
        self._num_received = 0
        self._reported = State()

    def serve(self) -> str | None:
        """Serve until the front ends it. What went wrong in words, None if nothing did."""
        self._loop.watch(self._report)
        self._loop.start()
        reason = "member 0 is gone: its connection ended"
        try:
            while (message := self._connection.receive()) is not None:
                if isinstance(message, Shutdown):
                    self._loop.shutdown()
                    self._connection.close()
                    return self._loop.error
                if isinstance(message, State):
                    reason = f"member 0 has stopped: {message.error}"
                    break
                self._take(message)
        except ValueError as error:
            reason = f"member 0 sent what is no message: {error}"
        self._loop.abandon(reason, timeout=ABANDON_SECONDS)
        self._connection.close()
        return self._loop.error or reason

    def _take(self, message: Message) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                for rid in message.rids:
                    self._loop.abort(rid)
            case AskMetrics():
                text = generate_latest(self._registry).decode()
                self._connection.send(Metrics(message.number, text))
            case _:
                raise ValueError(f"{message.kind} is not for a member")

    def _submit(self, message: Submit) -> None:
        requests = [
            Request(new.rid, new.prompt_ids, new.params, partial(self._send, new.rid))
            for new in message.requests
        ]
        # The counts of one report belong together.
        with self._lock:
            try:
                self._loop.submit(requests)
            except Exception as error:
                logger.exception("the loop refused what the front had accepted")
                for request in requests:
                    self._send(request.rid, Output(finish_reason="error", error=str(error)))
            self._num_received += len(requests)
        self._report()

    def _send(self, rid: str, output: Output) -> None:
        self._connection.send(Progress(rid, output))

    def _report(self) -> None:
        """Tell the front where the requests are, if that has changed."""
        with self._lock:
            loop = self._loop
            state = State(self._num_received, loop.num_waiting, loop.num_running, loop.error)
            if state != self._reported:
                self._reported = state
                self._connection.send(state)
        if state.error is not None:
            self._connection.finish()
