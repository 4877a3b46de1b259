"""A small random model with a byte tokenizer, and a server that knows the right answers."""

import argparse
import functools
import http.server
import json
import shutil
import threading
from pathlib import Path

import jax
import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint
from jaxmoe.evaluation import cli
from jaxmoe.offline.engine import OfflineEngine
from jaxmoe.tasks import EVALUATION_SETS, evaluation_set


BYTES = Path(__file__).parents[2] / "byte_tokenizer"


@pytest.fixture(scope="session", autouse=True)
def _devices():
    """Before a command decides how many there are."""
    jax.devices()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    target = tmp_path_factory.mktemp("evaluation") / "model"
    config = {
        **RANDOM_CONFIGS["tiny"],
        "vocab_size": 320,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "max_position_embeddings": 1024,
    }
    write_random_checkpoint(target, config, seed=0, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BYTES / name, target / name)
    return target


@pytest.fixture(scope="session")
def _load_once():
    return functools.cache(OfflineEngine.load)


@pytest.fixture
def shared_engines(_load_once, monkeypatch):
    """Equal settings get the same engine in all tests, so that its programs compile once."""
    monkeypatch.setattr(OfflineEngine, "load", _load_once)


@pytest.fixture
def run(capsys):
    """Runs the command: exit status, stdout, stderr."""

    def call(*arguments):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        status = cli.run(parser.parse_args(list(map(str, arguments))))
        return status, *capsys.readouterr()

    return call


class _HttpServer(http.server.ThreadingHTTPServer):
    request_queue_size = 64  # past five, connections wait a second to be tried again


class FakeServer:
    """Answers chat completions with the items' solutions, until told otherwise.

    Attributes:
      replies: question to what it gets instead, one after the other: (status, headers, object),
        or None to drop the connection.
      bodies: of all completion requests.
      most_at_once: requests it had at the same time.
    """

    def __init__(self):
        self.solutions = {
            item.question: item.solution
            for name in EVALUATION_SETS
            for item in evaluation_set(name)
        }
        self.replies, self.bodies = {}, []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        self._server = _HttpServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def complete(self, body):
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.bodies.append(body)
        question = body["messages"][0]["content"]
        try:
            if self.replies.get(question):
                return self.replies[question].pop(0)
            text = self.solutions[question]
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return 200, {}, {"choices": [choice], "usage": {"completion_tokens": 7}}
        finally:
            with self._lock:
                self._now -= 1

    def _handler(self):
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                assert self.path == "/v1/models"
                self._reply(200, {}, {"data": [{"id": "the-model"}]})

            def do_POST(self):
                assert self.path == "/v1/chat/completions"
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if (reply := fake.complete(body)) is not None:
                    self._reply(*reply)

            def _reply(self, status, headers, value):
                content = json.dumps(value).encode()
                self.send_response(status)
                for name, text in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        return Handler


@pytest.fixture
def server():
    fake = FakeServer()
    yield fake
    fake.close()
