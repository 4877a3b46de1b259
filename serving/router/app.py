"""The router's endpoints."""

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from http import HTTPStatus
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from serving.http.base import make_base, read_bytes, read_model
from serving.http.errors import client_gone, invalid, unavailable
from serving.router.forward import Call, Forwarder, bad_gateway, no_worker
from serving.router.metrics import RouterMetrics
from serving.router.monitor import ask, watch
from serving.router.policy import POLICIES
from serving.router.pool import (
    Deregistration,
    Pool,
    Registration,
    Role,
    Snapshot,
    State,
    reason_of,
)


CONNECT_TIMEOUT = 5.0
BROADCAST_TIMEOUT = 30.0
HEALTH_TIMEOUT = 20.0
# uvicorn closes what was idle for 5 s; a request on its way just then would be lost.
KEEP_ALIVE = 2.0
# A machine that has vanished is noticed in half a minute, however long workers may be silent.
TCP_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

ONE_TOKEN = {
    "text": "a",
    "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
}


def make_app(
    pool: Pool, *, policy: str, max_retries: int, request_timeout: float | None = None
) -> FastAPI:
    """Route requests over the workers of `pool`, which is watched while the application runs.

    `request_timeout` bounds the seconds for which a worker is silent.
    """
    client = _make_client(request_timeout)
    registry = CollectorRegistry()
    policies = {role: POLICIES[policy]() for role in Role}
    forwarder = Forwarder(
        pool, policies, client, RouterMetrics(registry, pool), max_retries=max_retries
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(pool, client))
            yield
            watching.cancel()

    app = make_base(registry, lifespan)

    @app.post("/generate")
    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def generate(http: HttpRequest) -> Response:
        return Relayed(forwarder, await Call.read(http, generates=True))

    @app.get("/v1/models")
    @app.get("/v1/models/{name:path}")
    @app.get("/get_model_info")
    async def model_info(http: HttpRequest) -> Response:
        return Relayed(forwarder, await Call.read(http, generates=False))

    @app.get("/health")
    async def health() -> Response:
        if missing := pool.missing():
            raise no_worker(missing)
        return JSONResponse({"status": "ok"})

    @app.get("/health_generate")
    async def health_generate() -> Response:
        headers = [(b"content-type", b"application/json")]
        body = json.dumps(ONE_TOKEN).encode()
        call = Call("POST", b"/generate", headers, body, generates=True)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT), forwarder.answer(call) as answer:
                if answer.status != HTTPStatus.OK:
                    raise unavailable(f"a request for one token was answered with {answer.status}")
        except TimeoutError:
            raise unavailable(f"no token within {HEALTH_TIMEOUT:g} s") from None
        return JSONResponse({"status": "ok"})

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        for chooser in policies.values():
            chooser.forget()
        answers = await _ask_all(client, _reachable(pool, *Role), "/flush_cache", b"")
        failed = {url: answer for url, answer in answers.items() if not _is_success(answer)}
        if failed:
            message = "; ".join(f"{url}: {_said(answer)}" for url, answer in failed.items())
            is_refused = all(isinstance(answer, httpx.Response) for answer in failed.values())
            raise invalid(None, message) if is_refused else bad_gateway(message)
        return JSONResponse({"status": "flushed"})

    @app.post("/abort_request")
    async def abort_request(http: HttpRequest) -> Response:
        body = await read_bytes(http)
        answers = await _ask_all(client, _reachable(pool, Role.DECODE), "/abort_request", body)
        num_aborted = 0
        for answer in answers.values():
            if isinstance(answer, httpx.Response):
                if answer.is_client_error:  # all say the same of a body that is wrong
                    content_type = answer.headers.get("content-type")
                    return Response(answer.content, answer.status_code, media_type=content_type)
                if answer.is_success:
                    num_aborted += answer.json()["num_aborted"]
        return JSONResponse({"num_aborted": num_aborted})

    @app.post("/register")
    async def register(http: HttpRequest) -> Response:
        registration = await read_model(http, Registration)
        if not pool.beat(registration):
            try:
                status = await ask(client, registration.url)
            except (httpx.HTTPError, ValueError) as error:
                reason = f"GET {registration.url}/disaggregation failed: {reason_of(error)}"
                raise unavailable(reason) from error
            try:
                pool.register(registration, status)
            except ValueError as error:
                raise invalid(None, str(error)) from error
        return JSONResponse({"status": "registered"})

    @app.post("/deregister")
    async def deregister(http: HttpRequest) -> Response:
        pool.deregister((await read_model(http, Deregistration)).url)
        return JSONResponse({"status": "deregistered"})

    @app.get("/servers")
    async def servers() -> Response:
        return JSONResponse({"servers": [_describe(worker) for worker in pool.workers()]})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return app


def _make_client(request_timeout: float | None) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        # Any number of connections: a stream has one for as long as it lasts.
        limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE),
        socket_options=[
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *(
                (socket.IPPROTO_TCP, getattr(socket, name), value)
                for name, value in TCP_KEEP_ALIVE.items()
                if hasattr(socket, name)
            ),
        ],
    )
    return httpx.AsyncClient(
        transport=transport,
        timeout=httpx.Timeout(request_timeout, connect=CONNECT_TIMEOUT),
        trust_env=False,  # workers are asked directly, whatever proxy the environment names
    )


class Relayed(Response):
    """What the workers answer to a call, who are left alone as soon as the client is."""

    def __init__(self, forwarder: Forwarder, call: Call):
        super().__init__()
        self._forwarder = forwarder
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def relay() -> None:
            async with self._forwarder.answer(self._call) as answer:
                await answer.send(noting_send)

        if not await _done_before_disconnect(relay(), receive) and not has_begun:
            raise client_gone()


async def _done_before_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Whether `work` is over before the client has left, when it is cancelled."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(work)
    tasks = (working, asyncio.create_task(disconnect()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if working.cancelled():
        return False
    working.result()
    return True


def _reachable(pool: Pool, *roles: Role) -> list[str]:
    return [
        worker.url
        for worker in pool.workers()
        if worker.role in roles and worker.state is not State.OFFLINE
    ]


async def _ask_all(
    client: httpx.AsyncClient, urls: Sequence[str], path: str, body: bytes
) -> dict[str, httpx.Response | httpx.RequestError]:
    async def ask_one(url: str) -> httpx.Response | httpx.RequestError:
        try:
            return await client.post(f"{url}{path}", content=body, timeout=BROADCAST_TIMEOUT)
        except httpx.RequestError as error:
            return error

    return dict(zip(urls, await asyncio.gather(*map(ask_one, urls)), strict=True))


def _is_success(answer: httpx.Response | httpx.RequestError) -> bool:
    return isinstance(answer, httpx.Response) and answer.is_success


def _said(answer: httpx.Response | httpx.RequestError) -> str:
    if isinstance(answer, httpx.Response):
        return f"{answer.status_code} {answer.text}"
    return reason_of(answer)


def _describe(worker: Snapshot) -> dict[str, Any]:
    values = dataclasses.asdict(worker)
    return {**values, "role": worker.role.value, "state": worker.state.value, "load": worker.load}
