"""What every application of this package has: errors in OpenAI's form, a count of requests, bounded
bodies. It is the same in front of a model and in front of other servers, and imports no JAX."""

import logging
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from jaxmoe import __version__
from serving.http.errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    client_gone,
    dotted,
    failed,
    from_validation,
    invalid,
)


logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20

ModelType = TypeVar("ModelType", bound=BaseModel)


def make_base(metrics: CollectorRegistry, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """An application without endpoints; `metrics` gets its counter of requests."""
    app = FastAPI(title="jaxmoe", version=__version__, lifespan=lifespan)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(CountRequests, registry=metrics)
    return app


async def read_bytes(http: HttpRequest) -> bytes:
    """The body of a call, refused when it is too large."""
    data = bytearray()
    try:
        async for chunk in http.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body must not be larger than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise client_gone() from None
    return bytes(data)


async def read_model(http: HttpRequest, kind: type[ModelType]) -> ModelType:
    """The checked body of a call, whatever its content type says."""
    try:
        return kind.model_validate_json(await read_bytes(http))
    except ValidationError as error:
        raise from_validation(error) from None


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
