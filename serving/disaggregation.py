"""What a worker of one role has besides a node: its end of the transfers, and its router.

`Worker` is either side; with role UNIFIED it has nothing to do.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import jax

import jaxmoe
from serving.config import ServerConfig
from serving.connection import format_address
from serving.engine import Engine
from serving.kv_transfer.backends import Backend, make_backend
from serving.kv_transfer.fetcher import Fetcher
from serving.kv_transfer.messages import SILENCE_SECONDS, Hello
from serving.kv_transfer.server import PrefillServer
from serving.loop import ServingLoop
from serving.peers import Peers


logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
RETRY_SECONDS = 1.0  # when the router is not there
POST_SECONDS = 5.0
WILDCARDS = ("0.0.0.0", "::", "")


def make_fetcher(config: ServerConfig, engine: Engine, peers: Peers, digest: str) -> Fetcher:
    """Of a decode worker's loop. `digest` says which model this is."""
    return Fetcher(
        _hello(config, engine, digest),
        _backend(config, engine),
        engine.placed_on,
        engine.limits.page_size,
        timeout=config.disaggregation_timeout,
        wake=peers.wake,
    )


def make_prefill_server(
    config: ServerConfig,
    engine: Engine,
    loop: ServingLoop,
    listener: socket.socket,
    digest: str,
    failure_probability: float,
) -> PrefillServer:
    """Of a prefill worker, which decode workers reach through `listener`."""
    return PrefillServer(
        loop,
        listener,
        _hello(config, engine, digest),
        _backend(config, engine),
        failure_probability=failure_probability,
    )


def _backend(config: ServerConfig, engine: Engine) -> Backend:
    return make_backend(
        config.disaggregation_transfer_backend,
        config.host,
        engine.block,
        checksums=config.disaggregation_checksums,
        timeout=SILENCE_SECONDS,
    )


def _hello(config: ServerConfig, engine: Engine, digest: str) -> Hello:
    fingerprint = {
        "jaxmoe": jaxmoe.__version__,
        "config.json of the model": digest,
        "--page-size": str(config.page_size),
        "type of the cache": str(engine.block.dtype),
        "--disaggregation-transfer-backend": config.disaggregation_transfer_backend,
    }
    if config.disaggregation_transfer_backend == "jax":
        fingerprint["jax"] = jax.__version__
    return Hello(fingerprint, engine.limits.context_length)


def reachable_host(host: str, peer: str | None = None) -> str:
    """The address of this machine that others reach it by, when it listens on `host`: that of the
    interface towards `peer`, or towards the outside, if `host` means all interfaces."""
    if host not in WILDCARDS:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    outside = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"  # for documentation
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        for target in (peer, outside):
            with contextlib.suppress(OSError):  # nothing is sent; it only chooses a route
                if target is not None:
                    probe.connect((target, 9))
                    return probe.getsockname()[0]
    return socket.gethostname()


class Registration:
    """Tells the router at `url` of a worker, again and again, until it leaves.

    A router that is not there is tried again soon.
    """

    def __init__(self, url: str, worker: dict[str, str | None]):
        self._url = url.rstrip("/")
        self._worker = worker
        self._leaving = threading.Event()
        self._was_heard: bool | None = None
        self._thread = threading.Thread(target=self._beat, name="registration", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """No more requests are to come."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._thread.join()
            self._post("/deregister", {"url": self._worker["url"]})

    def _beat(self) -> None:
        while True:
            self._note(self._post("/register", self._worker))
            if self._leaving.wait(BEAT_SECONDS if self._was_heard else RETRY_SECONDS):
                return

    def _post(self, path: str, body: dict[str, str | None]) -> str | None:
        """What went wrong, None if nothing did."""
        try:
            answer = httpx.post(self._url + path, json=body, timeout=POST_SECONDS, trust_env=False)
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"{answer.status_code}: {answer.text}"

    def _note(self, error: str | None) -> None:
        """Say so when that changes."""
        if error is None and self._was_heard is not True:
            logger.info("registered with the router at %s", self._url)
        if error is not None and self._was_heard is not False:
            logger.warning("not registered with the router at %s: %s", self._url, error)
        self._was_heard = error is None


class Worker:
    """This process among others: started with the server, closed after its loop has ended.

    Attributes:
      transfer_address: where decode workers reach a prefill worker, None for others.
    """

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        fetcher: Fetcher | None = None,
        server: PrefillServer | None = None,
        transfers: socket.socket | None = None,
    ):
        peer = None if config.router is None else urlsplit(config.router).hostname
        host = reachable_host(config.host, peer)
        self.transfer_address = (
            None if transfers is None else format_address(host, transfers.getsockname()[1])
        )
        self._ends: list[Fetcher | PrefillServer] = [e for e in (fetcher, server) if e is not None]
        self._server = server
        self._registration = None
        if config.router is not None:
            url = f"http://{format_address(host, listener.getsockname()[1])}"
            about = {
                "mode": config.disaggregation_mode,
                "url": url,
                "transfer_address": self.transfer_address,
            }
            self._registration = Registration(config.router, about)

    @property
    def counts(self) -> Callable[[], dict[str, int | float]] | None:
        return self._ends[0].counts.read if self._ends else None

    def start(self) -> None:
        """The server takes requests, and so does the loop."""
        if self._server is not None:
            self._server.start()
            logger.info("decode workers reach this one at %s", self.transfer_address)
        if self._registration is not None:
            self._registration.start()

    def leave(self) -> None:
        """The server takes no more requests."""
        if self._registration is not None:
            self._registration.leave()

    def close(self) -> None:
        self.leave()
        for end in self._ends:
            end.close()
