"""`jaxmoe serve --pd 1x1`: a router, prefill workers and decode workers, on one machine.

This process is the router; each worker is a process with the same flags and a role, which registers
here. What workers print is shown with their names. A worker that ends once it was ready is started
again; one that ends before that ends everything.
"""

import argparse
import dataclasses
import logging
import shlex
import signal
import subprocess
import sys
import threading
import time

import httpx

from serving.config import ServerConfig, add_arguments, arguments_of, from_arguments
from serving.connection import format_address
from serving.disaggregation import WILDCARDS
from serving.http import server
from serving.roles import Role
from serving.router.app import make_app
from serving.router.pool import Pool


logger = logging.getLogger(__name__)

POLICY = "cache_aware"
MAX_RETRIES = 2
RESTART_SECONDS = 1.0
HEALTH_SECONDS = 0.1


def serve(config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM; the exit status. Raises ValueError for what is refused."""
    commands = worker_commands(config)
    server.set_up_logging(config.log_level)
    with server.listen(config.host, config.port) as listener:
        host, port = listener.getsockname()[:2]
        near = "127.0.0.1" if host in WILDCARDS else host
        workers = Workers(commands, f"http://{format_address(near, port)}", config.drain_timeout)
        try:
            server.run(
                make_app(Pool(), policy=POLICY, max_retries=MAX_RETRIES),
                listener,
                log_level=config.log_level,
                drain_timeout=config.drain_timeout,
                at_begin=workers.start,
            )
        finally:
            workers.stop()
    return 1 if workers.failed else 0


def worker_commands(config: ServerConfig) -> dict[str, list[str]]:
    """The arguments of each worker's `jaxmoe serve`, by its name, without `--router`.

    Raises ValueError for what a worker would refuse.
    """
    assert config.pd is not None
    common = dataclasses.replace(config, pd=None, prefill_args="", decode_args="", port=0)
    commands = {}
    for role, extra in ((Role.PREFILL, config.prefill_args), (Role.DECODE, config.decode_args)):
        for index in range(config.pd_workers[role]):
            name = f"{role.value} {index}"
            arguments = [
                *arguments_of(common),
                "--disaggregation-bootstrap-port=0",
                *shlex.split(extra),
                f"--disaggregation-mode={role.value}",
            ]
            own = _parse(name, arguments)
            if own.base_gpu_id is not None and index:
                if own.ep_size is None:
                    raise ValueError(f"several workers with --base-gpu-id need --ep-size ({name})")
                arguments.append(f"--base-gpu-id={own.base_gpu_id + index * own.ep_size}")
            commands[name] = arguments
    return commands


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(f"{self.prog}: {message}")


def _parse(name: str, arguments: list[str]) -> ServerConfig:
    parser = _Parser(prog=f"the {name} worker", add_help=False)
    add_arguments(parser)
    return from_arguments(parser.parse_args(arguments))


class Workers:
    """The worker processes, each with a thread that shows what it prints.

    Attributes:
      failed: some worker could not be started.
    """

    def __init__(self, commands: dict[str, list[str]], router: str, drain_timeout: float):
        self.failed = False
        self._router = router
        self._drain_timeout = drain_timeout
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._are_ready = {name: threading.Event() for name in commands}
        self._threads = [
            threading.Thread(target=self._keep, args=(name, arguments), name=name, daemon=True)
            for name, arguments in commands.items()
        ]
        self._threads.append(threading.Thread(target=self._announce, name="ready", daemon=True))

    def start(self, url: str) -> None:
        """The router takes requests at `url`."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the workers finish what they have, and end them."""
        with self._lock:  # no other is started from here on
            self._stopping.set()
            processes = list(self._processes.values())
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + 2 * self._drain_timeout + 5
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def _keep(self, name: str, arguments: list[str]) -> None:
        """Run a worker, again and again once it has worked."""
        command = [sys.executable, "-m", "serving.cli", "serve", *arguments]
        while True:
            with self._lock:
                if self._stopping.is_set():
                    return
                process = self._processes[name] = subprocess.Popen(
                    [*command, f"--router={self._router}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,  # a terminal's Ctrl-C is for the router alone
                )
            assert process.stdout is not None
            for line in process.stdout:
                print(f"[{name}] {line}", end="", flush=True)
                if line.startswith("Ready:"):
                    self._are_ready[name].set()
            status = process.wait()
            if self._stopping.is_set():
                return
            logger.error("the %s worker has ended with status %d", name, status)
            if not self._are_ready[name].is_set():
                self.failed = True
                signal.raise_signal(signal.SIGTERM)
                return
            if self._stopping.wait(RESTART_SECONDS):
                return

    def _announce(self) -> None:
        """Say so when requests can be answered."""
        for is_ready in self._are_ready.values():
            while not is_ready.wait(HEALTH_SECONDS):
                if self._stopping.is_set():
                    return
        while not self._stopping.is_set():
            answer = httpx.get(f"{self._router}/health", trust_env=False)
            if answer.is_success:
                server.announce(self._router)
                return
            self._stopping.wait(HEALTH_SECONDS)
