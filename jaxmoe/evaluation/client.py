"""Answers of a running OpenAI-compatible server, through the standard library's HTTP client.

A server that is full is waited for; a connection that breaks is tried again; anything else is that
item's failure. After `MAX_FAILURES_IN_A_ROW` the server is taken to be gone, and what is left fails
at once.
"""

import concurrent.futures
import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmoe.evaluation.answers import Answer


TIMEOUT_SECONDS = 600.0
MAX_BUSY_SECONDS = 600.0
MAX_RETRY_SECONDS = 30.0
RECONNECT_SECONDS = 1.0
MAX_ATTEMPTS = 3
MAX_FAILURES_IN_A_ROW = 10
BUSY_STATUSES = (429, 503)


class ServerError(OSError):
    """The server cannot be reached or answers with something else than was asked for."""


class _BusyError(ServerError):
    def __init__(self, message: str, retry_seconds: float):
        super().__init__(message)
        self.retry_seconds = retry_seconds


class ServerAnswerer:
    """A server's chat completions at temperature 0.

    The model is the first one the server lists.
    """

    backend = "server"

    def __init__(self, base_url: str, *, max_new_tokens: int, num_concurrent: int):
        """Asks the server for its model. Raises ServerError if it does not answer."""
        if num_concurrent < 1:
            raise ValueError(f"the number of concurrent requests must be positive, got "
                             f"{num_concurrent}")  # fmt: skip
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, got {max_new_tokens}")
        self._url = base_url.rstrip("/").removesuffix("/v1")
        parts = urllib.parse.urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the base URL must be http(s)://host[:port][/v1], got {base_url!r}")
        self._is_secure = parts.scheme == "https"
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._max_new_tokens = max_new_tokens
        self._num_concurrent = num_concurrent
        self._failures = _FailuresInARow()
        try:
            self._model: str = self._call("GET", "/v1/models")["data"][0]["id"]
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self._url}/v1/models lists no model") from error
        self.settings: Mapping[str, Any] = {"model": self._model, "base_url": self._url}

    def answers(self, questions: Sequence[str]) -> Iterator[tuple[int, Answer]]:
        pool = concurrent.futures.ThreadPoolExecutor(self._num_concurrent)
        try:
            index_of = {pool.submit(self._answer, text): i for i, text in enumerate(questions)}
            for future in concurrent.futures.as_completed(index_of):
                yield index_of[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _answer(self, question: str) -> Answer:
        if self._failures.is_over:
            return Answer(None, error=f"not asked, {MAX_FAILURES_IN_A_ROW} failed in a row")
        try:
            completion = self._ask(question)
        except ServerError as error:
            self._failures.add()
            return Answer(None, error=str(error))
        self._failures.reset()
        return completion

    def _ask(self, question: str) -> Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": self._max_new_tokens,
        }
        completion = self._call("POST", "/v1/chat/completions", body)
        try:
            text = completion["choices"][0]["message"]["content"] or ""
            return Answer(str(text), int((completion.get("usage") or {})["completion_tokens"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"not a chat completion: {completion!r:.200}") from error

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        attempt, began = 1, time.monotonic()
        while True:
            try:
                return self._call_once(method, path, body)
            except _BusyError as error:
                if time.monotonic() - began > MAX_BUSY_SECONDS:
                    raise
                time.sleep(error.retry_seconds)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ServerError):
                    raise
                if attempt == MAX_ATTEMPTS or isinstance(error, ConnectionRefusedError):
                    raise ServerError(f"{self._url}{path}: {error!r}") from error
                attempt += 1
                time.sleep(RECONNECT_SECONDS)

    def _call_once(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            payload = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"} if payload else {}
            connection.request(method, self._path + path, payload, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            message = f"{path}: {response.status} {_message(content)}"
            if response.status in BUSY_STATUSES:
                raise _BusyError(message, _retry_seconds(response.getheader("Retry-After")))
            raise ServerError(message)
        try:
            return json.loads(content)
        except ValueError as error:
            raise ServerError(f"{path}: not JSON: {content!r:.200}") from error


class _FailuresInARow:
    """Counted over all threads."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return self._count >= MAX_FAILURES_IN_A_ROW

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def reset(self) -> None:
        with self._lock:
            self._count = 0


def _retry_seconds(header: str | None) -> float:
    """Of a Retry-After header in seconds; one second if it is missing or a date."""
    try:
        return min(MAX_RETRY_SECONDS, max(0.0, float(header or 1)))
    except ValueError:
        return 1.0


def _message(content: bytes) -> str:
    """An OpenAI error's message, else the beginning of the body."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode(errors="replace")
