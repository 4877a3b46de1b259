"""A request on its way to the workers, and the answer on its way back.

Until a worker has begun to answer, another is tried when it fails; after that nothing is. Bytes
pass through as they are. Leaving an answer's context, or being cancelled, closes the connection to
the worker, which then ends the request: there is nothing else to clean up.
"""

import contextlib
import dataclasses
import enum
import json
import logging
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import nullcontext
from http import HTTPStatus

import httpx
from fastapi import Request as HttpRequest
from starlette.types import Send

from serving.http.base import read_bytes
from serving.http.errors import ApiError, unavailable
from serving.http.events import DONE, event
from serving.router.metrics import RouterMetrics
from serving.router.policy import Policy
from serving.router.pool import Pool, Role, Snapshot, reason_of


logger = logging.getLogger(__name__)

PREFILL_ADDRESS = "X-Prefill-Address"
FAILED_PEER = "X-Failed-Peer"

Headers = list[tuple[bytes, bytes]]

# Of one connection only; RFC 9110, 7.6.1.
_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
    b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
_NOT_FOR_WORKERS = _HOP_BY_HOP | {
    b"host", b"content-length", b"expect", PREFILL_ADDRESS.lower().encode()
}  # fmt: skip
_NOT_FOR_CLIENTS = _HOP_BY_HOP | {b"content-length", b"date", b"server"}


@dataclasses.dataclass(frozen=True)
class Call:
    """What is asked of the workers.

    Attributes:
      target: path and query, as the client wrote them.
      generates: a prefill worker is needed too.
    """

    method: str
    target: bytes
    headers: Headers
    body: bytes
    generates: bool

    @classmethod
    async def read(cls, http: HttpRequest, *, generates: bool) -> "Call":
        target, query = http.scope["raw_path"], http.scope["query_string"]
        headers = _without(http.headers.raw, _NOT_FOR_WORKERS)
        body = await read_bytes(http)
        return cls(http.method, target + b"?" * bool(query) + query, headers, body, generates)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A worker's answer: all of it, or a stream of events."""

    status: int
    headers: Headers
    content: bytes | AsyncIterator[bytes]

    async def send(self, send: Send) -> None:
        headers, content = self.headers, self.content
        if isinstance(content, bytes):
            headers = [*headers, (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        if isinstance(content, bytes):
            await send({"type": "http.response.body", "body": content})
            return
        async for chunk in content:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Retry(enum.Enum):
    """Why a request is worth sending once more."""

    CONNECTION = "connection"
    FAILED_PEER = "failed_peer"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"


class _FailedError(Exception):
    """An attempt failed: why, at which worker, and what to tell the client if it was the last."""

    def __init__(self, retry: Retry, url: str, outcome: Answer | ApiError):
        super().__init__(retry)
        self.retry = retry
        self.url = url
        self.outcome = outcome


class Forwarder:
    """Sends calls to the workers of a pool, at most `max_retries` times more than once."""

    def __init__(
        self,
        pool: Pool,
        policies: Mapping[Role, Policy],
        client: httpx.AsyncClient,
        metrics: RouterMetrics,
        *,
        max_retries: int,
    ):
        self._pool = pool
        self._policies = policies
        self._client = client
        self._metrics = metrics
        self._max_retries = max_retries

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        """What a worker answers, once it has begun to. Raises ApiError if none does."""
        started = time.monotonic()
        prompt = prompt_of(call.body) if call.generates else b""
        failed: set[str] = set()
        last: _FailedError | None = None
        for _ in range(1 + self._max_retries):
            decode = self._choose(Role.DECODE, prompt, failed)
            prefill = self._choose(Role.PREFILL, prompt, failed) if call.generates else None
            if decode is None or (call.generates and prefill is None):
                break
            if last is not None:
                self._metrics.retries.labels(last.retry.value).inc()
            try:
                async with self._attempt(call, decode, prefill, num_tokens_of(prompt)) as answer:
                    if call.generates:
                        self._metrics.first_byte.observe(time.monotonic() - started)
                    yield answer
                    return
            except _FailedError as failure:
                logger.info("%s failed a request: %s", failure.url, failure.retry.value)
                failed.add(failure.url)
                last = failure
        if last is None:
            raise no_worker(self._pool.missing())
        if isinstance(last.outcome, ApiError):
            raise last.outcome
        yield last.outcome

    def _choose(self, role: Role, prompt: bytes, failed: Collection[str]) -> Snapshot | None:
        workers = self._pool.online(role, but=failed)
        return self._policies[role].choose(workers, prompt) if workers else None

    @contextlib.asynccontextmanager
    async def _attempt(
        self, call: Call, decode: Snapshot, prefill: Snapshot | None, num_tokens: int
    ) -> AsyncIterator[Answer]:
        """The answer of these workers, begun; raises _FailedError if others may do better."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._pool.holding(decode.url, num_tokens))
            # A prefill worker has done its part when the decode worker begins to answer.
            with self._pool.holding(prefill.url, num_tokens) if prefill else nullcontext():
                answer = await self._begin(call, decode, prefill, stack)
            if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise self._refused(answer, decode, prefill)
            yield answer

    async def _begin(
        self,
        call: Call,
        decode: Snapshot,
        prefill: Snapshot | None,
        stack: contextlib.AsyncExitStack,
    ) -> Answer:
        """Ask, and await the first bytes of a stream or all of another answer; `stack` gets what
        ends the connection."""
        is_begun = False
        try:
            response = await self._client.send(_request(call, decode, prefill), stream=True)
            stack.push_async_callback(response.aclose)
            headers = _without(response.headers.raw, _NOT_FOR_CLIENTS)
            chunks = response.aiter_raw()
            if response.is_success and _is_event_stream(response):
                first = await anext(chunks, b"")
                events = self._events(first, chunks, decode)
                return Answer(response.status_code, headers, events)
            is_begun = True
            content = b"".join([chunk async for chunk in chunks])
            return Answer(response.status_code, headers, content)
        except httpx.TransportError as error:
            reason = reason_of(error)
            message = f"decode worker {decode.url} failed: {reason}"
            self._pool.suspect(decode.url, reason)
            if isinstance(error, httpx.ReadTimeout):
                raise ApiError(504, message, kind="timeout") from error
            if is_begun:
                raise bad_gateway(message) from error
            outcome = unavailable(message, retry_after=1)
            raise _FailedError(Retry.CONNECTION, decode.url, outcome) from error

    def _refused(self, answer: Answer, decode: Snapshot, prefill: Snapshot | None) -> _FailedError:
        """What a 503 means for the next attempt."""
        names = {name.lower() for name, _ in answer.headers}
        if prefill is not None and FAILED_PEER.lower().encode() in names:
            self._pool.suspect(prefill.url, f"{decode.url} cannot fetch from it")
            return _FailedError(Retry.FAILED_PEER, prefill.url, answer)
        if b"retry-after" in names:
            return _FailedError(Retry.QUEUE_FULL, decode.url, answer)
        self._pool.suspect(decode.url, "it answered 503")
        return _FailedError(Retry.UNAVAILABLE, decode.url, answer)

    async def _events(
        self, first: bytes, rest: AsyncIterator[bytes], decode: Snapshot
    ) -> AsyncIterator[bytes]:
        """A stream's bytes; if the worker fails in the middle, a last event says so."""
        tail = first
        try:
            yield first
            async for chunk in rest:
                tail = (tail + chunk)[-len(DONE) :]
                yield chunk
        except httpx.TransportError as error:
            reason = reason_of(error)
            self._pool.suspect(decode.url, reason)
            if not tail.endswith(DONE.encode()):
                said = event(bad_gateway(f"decode worker {decode.url} failed: {reason}").body)
                # What was cut off in the middle of an event is ended first.
                yield (("" if tail.endswith(b"\n\n") else "\n\n") + said + DONE).encode()


def no_worker(roles: Sequence[Role]) -> ApiError:
    """There is none of these roles to take a request."""
    missing = " and ".join(f"no {role.value} worker" for role in roles)
    return unavailable(f"{missing} is online", retry_after=1)


def bad_gateway(message: str) -> ApiError:
    return ApiError(502, message, kind="bad_gateway")


def prompt_of(body: bytes) -> bytes:
    """A prompt in a form that starts alike for prompts that start alike; empty if there is none.

    Whether the body is right is the worker's to say.
    """
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            return b""
        names = ("messages", "prompt", "text", "input_ids")
        prompt = next((fields[name] for name in names if fields.get(name) is not None), "")
        return json.dumps(prompt).encode()
    except (ValueError, RecursionError):
        return b""


def num_tokens_of(prompt: bytes) -> int:
    """Roughly: four bytes each."""
    return 1 + len(prompt) // 4


def _request(call: Call, decode: Snapshot, prefill: Snapshot | None) -> httpx.Request:
    headers = call.headers
    if prefill is not None:
        assert prefill.transfer_address is not None, "a prefill worker has one"
        address = prefill.transfer_address.encode()
        headers = [*headers, (PREFILL_ADDRESS.encode(), address)]
    url = httpx.URL(decode.url).copy_with(raw_path=call.target)
    return httpx.Request(call.method, url, headers=headers, content=call.body)


def _is_event_stream(response: httpx.Response) -> bool:
    return response.headers.get("content-type", "").startswith("text/event-stream")


def _without(headers: Headers, names: Collection[bytes]) -> Headers:
    """Without these and what the connection's own header names."""
    own = {
        name.strip().lower()
        for header, value in headers
        if header.lower() == b"connection"
        for name in value.split(b",")
    }
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in names and name.lower() not in own
    ]
