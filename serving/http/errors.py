"""Errors as clients see them: OpenAI's body, with the rule and the value in the message."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError


MAX_SHOWN_INPUT = 120
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is there to read it, but it is counted


class ApiError(Exception):
    """Ends a call with this status and OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The client's value breaks a rule."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int | float | None = None) -> ApiError:
    """The server cannot take the request now."""
    headers = None if retry_after is None else {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return ApiError(503, message, kind="service_unavailable", headers=headers)


def peer_failed(message: str, peer: str) -> ApiError:
    """Another server, at this address, did not do its part; with a different one it may work."""
    error = unavailable(message, retry_after=1)
    error.headers = {**(error.headers or {}), "X-Failed-Peer": peer}
    return error


def failed(message: str | None) -> ApiError:
    """The server took the request and could not do it."""
    return ApiError(500, message or "the request failed", kind="internal_server_error")


def client_gone() -> ApiError:
    """Ends a call whose client closed the connection."""
    return ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection")


def from_validation(error: ValidationError) -> ApiError:
    """The first rule that a body breaks."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not JSON. {first['msg']}")
    param = dotted(first["loc"])
    if first["type"] == "missing":
        return invalid(param, f"{param} is required")
    rule = first["msg"].removeprefix("Value error, ")
    return invalid(param, f"{param or 'body'}: {rule}, got {shown(first['input'])}")


def dotted(loc: Sequence[str | int]) -> str | None:
    return ".".join(map(str, loc)) or None


def shown(value: Any) -> str:
    """A client's value in a message, cut when long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_INPUT else text[:MAX_SHOWN_INPUT] + "..."
