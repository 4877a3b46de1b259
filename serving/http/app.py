"""The FastAPI application: endpoints, errors in OpenAI's form, and a count of requests."""

import logging
import time
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxmoe import __version__
from jaxmoe.tokenizer import Tokenizer
from serving.http import native, openai
from serving.http.calls import Calls, Loop
from serving.http.errors import CLIENT_CLOSED_REQUEST, ApiError, dotted, failed, invalid
from serving.http.protocol import ModelInfo
from serving.http.service import Service
from serving.roles import Role


logger = logging.getLogger(__name__)


def make_app(
    loop: Loop,
    tokenizer: Tokenizer,
    info: ModelInfo,
    metrics: CollectorRegistry,
    *,
    health_timeout: float = 20.0,
    role: Role = Role.UNIFIED,
    transfer_address: str | None = None,
) -> FastAPI:
    """Serve `loop` over HTTP. It must be started and outlive the application; `metrics` is what
    `/metrics` shows and gets this layer's counter. `role` and `transfer_address` are as in
    `Service`."""
    service = Service(
        loop, Calls(loop), tokenizer, info, int(time.time()), health_timeout, role, transfer_address
    )
    app = FastAPI(title="jaxmoe", version=__version__)
    app.include_router(openai.make_router(service))
    app.include_router(native.make_router(service, metrics))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(CountRequests, registry=metrics)
    return app


class CountRequests:
    """Counts answers by endpoint and status. Plain ASGI: streams pass through untouched."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry):
        self._app = app
        self._requests = Counter(
            "jaxmoe_http_requests",
            "HTTP requests answered",
            ("endpoint", "status"),
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = HTTPStatus.INTERNAL_SERVER_ERROR.value

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            # The route's pattern, never the client's path: every label value is kept forever.
            endpoint = getattr(scope.get("route"), "path", "unknown")
            self._requests.labels(endpoint, str(status)).inc()


async def _on_api_error(http: HttpRequest, error: Any) -> Response:
    if error.status == CLIENT_CLOSED_REQUEST:
        return Response(status_code=error.status)
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _on_invalid_request(http: HttpRequest, error: Any) -> Response:
    first = error.errors()[0]
    return await _on_api_error(http, invalid(dotted(first["loc"]), first["msg"]))


async def _on_http_exception(http: HttpRequest, error: Any) -> Response:
    code = "not_found" if error.status_code == HTTPStatus.NOT_FOUND else None
    message = f"{http.method} {http.url.path}: {error.detail}"
    return await _on_api_error(
        http, ApiError(error.status_code, message, code=code, headers=error.headers)
    )


async def _on_bug(http: HttpRequest, error: Any) -> Response:
    logger.exception("%s %s failed", http.method, http.url.path, exc_info=error)
    return await _on_api_error(http, failed("an internal error; see the server's log"))
