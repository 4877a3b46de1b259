"""A port to listen on, and an application served there until a signal ends it."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from serving.connection import format_address


def set_up_logging(level: str) -> None:
    """For the whole process."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,  # libraries may have set up the root logger their way
    )
    for name in ("httpx", "httpcore"):  # they would write of every poll and beat
        logging.getLogger(name).setLevel(logging.WARNING)


def listen(host: str, port: int) -> socket.socket:
    """Take the port first: a taken port should not be found out after minutes of loading."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {format_address(host, port)}: {error}") from error
    return listener


EXAMPLE = '{"messages": [{"role": "user", "content": "What is 9 * 268?"}], "temperature": 0}'


def announce(url: str, *, has_example: bool = True) -> None:
    """Say on the terminal that requests are taken, with an example of one."""
    print(f"\nReady: {url}", flush=True)
    if has_example:
        print(f"Try:   curl {url}/v1/chat/completions \\")
        print(f"         -H 'Content-Type: application/json' -d '{EXAMPLE}'\n", flush=True)


class _Server(uvicorn.Server):
    """Calls `at_begin` when requests are taken, `before_end` while they still are."""

    def __init__(
        self,
        config: uvicorn.Config,
        at_begin: Callable[[], None],
        before_end: Callable[[], None],
    ):
        super().__init__(config)
        self._at_begin = at_begin
        self._before_end = before_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._at_begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._before_end)
        await super().shutdown(sockets)


def run(
    app: ASGIApp,
    listener: socket.socket,
    *,
    log_level: str,
    drain_timeout: float,
    at_begin: Callable[[str], None] = announce,
    before_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests under way may then take `drain_timeout` seconds.

    `at_begin` is called with the URL when requests are taken, `before_end` on a thread when a
    signal has come, before connections are refused.
    """
    url = f"http://{format_address(*listener.getsockname()[:2])}"
    server = _Server(
        uvicorn.Config(
            app,
            log_level=log_level,
            access_log=log_level == "debug",
            # Requests under way may finish; what is left after that is cancelled.
            timeout_graceful_shutdown=max(1, round(drain_timeout)),
        ),
        lambda: at_begin(url),
        before_end,
    )
    # uvicorn raises a signal again once it has shut down; the caller's own shutdown still follows.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
