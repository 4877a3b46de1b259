"""Workers whose every byte a test decides, and a router in front of them, in one event loop."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import uvicorn

from serving.http import server
from serving.router.app import make_app
from serving.router.pool import Pool, Snapshot, State, Timing


FAST = Timing(poll=0.15, poll_of_others=0.05, silence=0.45)


class Asked:
    """A request that came to a worker, and the connection it is answered on."""

    def __init__(self, head: str, body: bytes, writer: asyncio.StreamWriter):
        first, *lines = head.split("\r\n")
        self.method, self.target, _ = first.split(" ")
        self.headers = [(name.lower(), value) for name, value in (x.split(": ") for x in lines)]
        self.body = body
        self._writer = writer

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name.lower()]

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        """A whole answer, JSON unless it is bytes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"content_length": str(len(content)), "content_type": "application/json"}
        await self.write(_head(status, fields | headers) + content)

    async def begin_events(self) -> None:
        fields = {"content_type": "text/event-stream; charset=utf-8"}
        await self.write(_head(200, fields | {"transfer_encoding": "chunked"}))

    async def chunk(self, data: bytes) -> None:
        """Of a stream; the empty one ends it."""
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    def break_off(self) -> None:
        self._writer.close()


def _head(status: int, headers: dict[str, str]) -> bytes:
    fields = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status} Said", *fields, "", ""]).encode()


Script = Callable[[Asked], Awaitable[None]]


async def hang(asked: Asked) -> None:
    await asyncio.Event().wait()


async def break_off(asked: Asked) -> None:
    asked.break_off()


class FakeWorker:
    """`script` answers requests, `status` is what it says of itself."""

    def __init__(self, mode: str, name: str):
        self.name = name
        self.status: Any = {
            "mode": mode, "transfer_address": f"{name}:8998" if mode == "prefill" else None,
            "model": "m", "page_size": 64, "num_running": 0, "num_waiting": 0, "draining": False,
        }  # fmt: skip
        self.script: Script = self.echo
        self.asked: list[Asked] = []
        self.num_left = 0
        """Times a client was gone before it had its answer."""
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def echo(self, asked: Asked) -> None:
        await asked.answer({"worker": self.name, "prefill": asked.header("x-prefill-address")})

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n")
        asked = Asked(head, b"", writer)
        asked.body = await reader.readexactly(int((asked.header("content-length") or ["0"])[0]))
        if asked.target == "/disaggregation":
            await asked.answer(self.status)
            return True
        self.asked.append(asked)
        script = asyncio.ensure_future(self.script(asked))
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.wait({script, leaving}, return_when=asyncio.FIRST_COMPLETED)
        has_left = not script.done()
        self.num_left += has_left
        for task in (script, leaving):
            task.cancel()
        await asyncio.wait({script, leaving})
        return not has_left and script.exception() is None


@contextlib.asynccontextmanager
async def started(mode: str) -> AsyncIterator[FakeWorker]:
    """A worker that no router knows yet."""
    worker = FakeWorker(mode, "new")
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()


class Router:
    """The whole router on a port, with fast polls."""

    def __init__(self, prefill: Sequence[FakeWorker] = (), decode: Sequence[FakeWorker] = ()):
        self.pool = Pool([w.url for w in prefill], [w.url for w in decode], timing=FAST)
        self.workers = [*prefill, *decode]
        self.client = httpx.AsyncClient(timeout=10)

    async def wait_until(self, holds: Callable[[], bool], seconds: float = 5) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.005)

    def worker(self, of: FakeWorker) -> Snapshot | None:
        return next((worker for worker in self.pool.workers() if worker.url == of.url), None)

    def state(self, of: FakeWorker) -> State | None:
        worker = self.worker(of)
        return None if worker is None else worker.state

    async def post(self, path: str = "/generate", **options: Any) -> httpx.Response:
        return await self.client.post(path, **(options or {"json": {"text": "a"}}))

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        return float(next((x[len(line) :] for x in text.splitlines() if x.startswith(line)), 0))


def _free_ports() -> list[int]:
    """In an order that their texts have too, as workers take turns by URL."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(8)]
        return sorted((each.getsockname()[1] for each in sockets), key=str)


@contextlib.asynccontextmanager
async def routed(
    prefill: Sequence[FakeWorker] = (),
    decode: Sequence[FakeWorker] = (),
    *,
    policy: str = "round_robin",
    **options: Any,
) -> AsyncIterator[Router]:
    """A router in front of these workers, which are started, once it knows them all."""
    async with contextlib.AsyncExitStack() as stack:
        for worker, port in zip((*prefill, *decode), _free_ports(), strict=False):
            worker.port = port
            await worker.start()
            stack.push_async_callback(worker.kill)
        router = Router(prefill, decode)
        app = make_app(router.pool, policy=policy, **{"max_retries": 2, **options})
        with server.listen("127.0.0.1", 0) as listener:
            router.client.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            uvicorn_server = uvicorn.Server(
                uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
            )
            serving = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
            try:
                await router.wait_until(
                    lambda: (
                        uvicorn_server.started
                        and all(worker.error != "not asked yet" for worker in router.pool.workers())
                    )
                )
                yield router
            finally:
                await router.client.aclose()
                uvicorn_server.should_exit = True
                await serving
