"""The FastAPI application in front of a serving loop."""

import time

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from jaxmoe.tokenizer import Tokenizer
from serving.http import native, openai
from serving.http.base import make_base
from serving.http.calls import Calls, Loop
from serving.http.protocol import ModelInfo
from serving.http.service import Service
from serving.roles import Role


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
    app = make_base(metrics)
    app.include_router(openai.make_router(service))
    app.include_router(native.make_router(service, metrics))
    return app
