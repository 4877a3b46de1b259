"""A prefill worker and a decode worker, as two loops of one process: the same answers as one worker
gives, and whatever happens every request ends and every page comes back."""

import contextlib
import dataclasses
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from serving.connection import Connection, format_address
from serving.engine import Engine
from serving.kv_transfer import fetcher as fetchers
from serving.kv_transfer import nixl
from serving.kv_transfer import server as servers
from serving.kv_transfer.arrivals import ArrivedToken, Lost
from serving.kv_transfer.backends import BACKENDS, make_backend
from serving.kv_transfer.fetcher import Fetcher
from serving.kv_transfer.messages import (
    CODEC,
    Cancel,
    Hello,
    Message,
    Pages,
    Ping,
    Prefill,
    Prefilled,
    Welcome,
)
from serving.kv_transfer.server import PrefillServer
from serving.peers import Alone
from serving.request import Phase, Request, SamplingParams, TokenLogprob


HELLO = Hello({"model": "tiny"}, 128)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 95, 96, 97, 110)
"""Around pages of 8 tokens and chunks of 32."""


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(2, 256, length).tolist()


def assorted(index: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=1 + index % 9,
        temperature=(0.0, 1.0)[index % 2],
        top_k=(0, 20)[index % 3 == 1],
        seed=index,
        ignore_eos=True,
        frequency_penalty=0.5 if index % 5 == 0 else 0.0,
        logit_bias={index: 2.0} if index % 4 == 0 else {},
        logprobs=True,
        num_top_logprobs=index % 3,
        prompt_logprobs=index % 3 == 2,
        prompt_logprobs_start=index % 2,
    )


def wait_for(condition: Callable[[], object], timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


class Pair:
    """One worker of each role. A prefill worker may be closed and started anew."""

    def __init__(
        self,
        new_client,
        prefill_engine: Engine,
        decode_engine: Engine,
        *,
        backend: str = "socket",
        timeout: float = 60.0,
        failure_probability: float = 0.0,
        decode_pages: int | None = None,
    ):
        self._new_client = new_client
        self._engine = prefill_engine
        self._backend = backend
        self.peers = Alone()
        self.fetcher = Fetcher(
            HELLO, self.make_backend(decode_engine), decode_engine.placed_on,
            decode_engine.limits.page_size, timeout=timeout, wake=self.peers.wake,
        )  # fmt: skip
        self.decode = new_client(
            self.peers, decode_engine, fetcher=self.fetcher, num_pages=decode_pages
        )
        self.decode.loop.start()
        self.port = 0
        self.start_prefill(failure_probability)

    def make_backend(self, engine: Engine):
        return make_backend(self._backend, "127.0.0.1", engine.block, checksums=True, timeout=5.0)

    def start_prefill(self, failure_probability: float = 0.0) -> None:
        self.prefill = self._new_client(Alone(), self._engine)
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        self.server = PrefillServer(
            self.prefill.loop, self.listener, HELLO, self.make_backend(self._engine),
            failure_probability=failure_probability,
        )  # fmt: skip
        self.prefill.loop.start()
        self.server.start()

    def close_prefill(self) -> None:
        self.server.close()
        self.prefill.loop.shutdown()
        self.prefill.check_free()
        assert self.server.num_unconfirmed == 0

    @property
    def address(self) -> str:
        return format_address("127.0.0.1", self.port)

    def submit(self, prompts, params, address: str | None = None):
        answers = []
        for prompt, param in zip(prompts, params, strict=True):
            self.decode._count += 1
            answer = type(self)._answer(f"request-{self.decode._count}", list(prompt), param)
            answer.request.prefill_address = address or self.address
            answers.append(answer)
        self.decode.loop.submit([answer.request for answer in answers])
        return answers

    def run(self, prompts, params):
        return [answer.wait() for answer in self.submit(prompts, params)]

    def close(self) -> None:
        """Everything is over: no request, no page, no transfer, no compilation is left."""
        self.decode.loop.shutdown()
        self.fetcher.close()
        self.close_prefill()
        self.decode.check_free()
        for client in (self.decode, self.prefill):
            assert client.loop.error is None
            assert client.metric("compilations_after_ready") == 0

    _answer: type


@pytest.fixture
def new_pair(
    new_client, new_answer, prefill_engine, decode_engine
) -> Iterator[Callable[..., Pair]]:
    pairs = []
    Pair._answer = new_answer

    def new(**options) -> Pair:
        pairs.append(Pair(new_client, prefill_engine, decode_engine, **options))
        return pairs[-1]

    yield new
    for pair in pairs:
        pair.close()


def outputs_of(answer) -> list[object]:
    """All that a client sees of it, but for the last digits."""

    def rounded(entries: tuple[TokenLogprob, ...]) -> list[object]:
        return [
            (e.token_id, e.logprob and round(e.logprob, 3), [t for t, _ in e.top]) for e in entries
        ]

    return [
        (o.text, o.token_ids, rounded(o.logprobs), rounded(o.prompt_logprobs), o.finish_reason)
        for o in answer.outputs
    ]


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="needs the extra jaxmoe[nixl]"
)


every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=needs_nixl if name == "nixl" else ()) for name in BACKENDS]
)


@every_backend
def test_answers_are_those_of_one_worker(new_pair, client, backend):
    prompts = [make_prompt(length) for length in EDGES]
    params = [assorted(index) for index in range(len(prompts))]
    pair = new_pair(backend=backend)
    apart = pair.run(prompts, params)
    whole = client.run(prompts, params)
    for one, other in zip(apart, whole, strict=True):
        assert outputs_of(one) == outputs_of(other), len(one.request.prompt_ids)
    counts = pair.fetcher.counts.read()
    assert counts["started"] == counts["succeeded"] == len(prompts)
    assert counts["pages"] == sum(-(-length // 8) for length in EDGES)
    wait_for(lambda: pair.server.counts.read()["succeeded"] == len(prompts))
    assert pair.server.counts.read()["pages"] == counts["pages"]


def test_pages_are_sent_full_as_chunks_are_done(new_pair, monkeypatch):
    sent: list[Message] = []
    monkeypatch.setattr(Connection, "send", spy(Connection.send, sent))
    new_pair().run([make_prompt(77)], [GREEDY])
    pages = [(m.first, m.count) for m in sent if isinstance(m, Pages)]
    # Chunks end at tokens 32, 64 and 77: full pages 0 to 3 and 4 to 7, then the rest.
    assert pages == [(0, 4), (4, 4), (8, 2)]


def spy(send, sent: list[Message]):
    def spied(self, message, *content):
        sent.append(message)
        send(self, message, *content)

    return spied


def test_what_the_decode_worker_has_cached_is_not_sent_again(new_pair, client):
    start = make_prompt(64)
    prompts = [start + make_prompt(20, seed) for seed in range(3)]
    pair = new_pair()
    answers = [pair.run([prompt], [GREEDY])[0] for prompt in prompts]
    # 11 pages at first, then 3: the first 64 tokens are 8 pages.
    assert pair.fetcher.counts.read()["pages"] == 11 + 3 + 3
    assert [a.outputs[0].cached_tokens for a in answers] == [0, 64, 64]
    whole = client.run(prompts, [GREEDY] * 3)
    assert [a.token_ids for a in answers] == [a.token_ids for a in whole]


def test_retraction_on_a_small_decode_worker_changes_no_answer(new_pair, client):
    """16 usable pages of 8 tokens on a rank cannot hold 4 sequences of up to 60."""
    prompts = [make_prompt(length, seed) for seed in range(4) for length in (3, 9, 17, 30)]
    params = dataclasses.replace(GREEDY, max_new_tokens=45, temperature=1.0, presence_penalty=0.5)
    pair = new_pair(decode_pages=17)
    apart = pair.run(prompts, [params] * 16)
    assert pair.decode.metric("num_retracted_reqs") > 0
    assert pair.fetcher.counts.read()["started"] > 16
    whole = client.run(prompts, [params] * 16)
    assert [a.token_ids for a in apart] == [a.token_ids for a in whole]


def test_aborted_in_every_phase(new_pair, prefill_engine, decode_engine, monkeypatch):
    """Waiting for pages, waiting for the prefill worker, and decoding."""
    pair = new_pair(decode_pages=25)
    gate = threading.Event()
    run = prefill_engine.run
    monkeypatch.setattr(prefill_engine, "run", lambda *args: gate.wait(30) and run(*args))
    long = dataclasses.replace(GREEDY, max_new_tokens=60)
    transferring = pair.submit([make_prompt(60, seed) for seed in range(8)], [long] * 8)
    wait_for(lambda: pair.prefill.loop.num_waiting + pair.prefill.loop.num_running == 8)
    waiting = pair.submit([make_prompt(60, seed) for seed in range(8, 12)], [long] * 4)
    wait_for(lambda: all(a.request.phase is Phase.TRANSFER for a in transferring))
    assert {a.request.phase for a in waiting} == {Phase.WAITING}
    for answer in (*waiting, *transferring[:5]):
        pair.decode.loop.abort(answer.request.rid)
        assert answer.wait().finish_reason == "abort"
    gate.set()
    decoding = transferring[5]
    assert decoding.first.wait(30) and decoding.request.phase is Phase.DECODE
    pair.decode.loop.abort(decoding.request.rid)
    assert decoding.wait().finish_reason == "abort"
    for answer in transferring[6:]:
        assert answer.wait().finish_reason == "length"
    # The prefill worker has heard of it.
    wait_for(lambda: pair.prefill.loop.num_waiting + pair.prefill.loop.num_running == 0)
    assert pair.server.counts.read()["succeeded"] == 3


@every_backend
def test_a_prefill_worker_that_is_gone_is_used_again_when_it_is_back(
    new_pair, prefill_engine, monkeypatch, backend
):
    pair = new_pair(backend=backend)
    expected = pair.run([make_prompt(70)], [GREEDY])[0].token_ids
    gate, entered = threading.Event(), threading.Event()
    run = prefill_engine.run

    def held(*args):
        entered.set()
        assert gate.wait(30)
        return run(*args)

    monkeypatch.setattr(prefill_engine, "run", held)
    answers = pair.submit([make_prompt(90, seed) for seed in range(4)], [GREEDY] * 4)
    assert entered.wait(30)
    for client in list(pair.server._all()):
        client.connection.finish()  # as if it had died
    for answer in answers:
        assert answer.wait().finish_reason == "error"
        assert answer.outputs[-1].failed_peer == pair.address
    gate.set()
    pair.close_prefill()
    lost = pair.submit([make_prompt(70)], [GREEDY])[0].wait()
    assert "refused" in lost.outputs[-1].error and lost.outputs[-1].failed_peer == pair.address
    pair.start_prefill()
    assert pair.run([make_prompt(70)], [GREEDY])[0].token_ids == expected


def test_a_decode_worker_that_is_gone_frees_the_prefill_worker(
    new_pair, prefill_engine, monkeypatch
):
    pair = new_pair()
    gate = threading.Event()
    run = prefill_engine.run
    monkeypatch.setattr(prefill_engine, "run", lambda *args: gate.wait(30) and run(*args))
    with socket.create_connection(("127.0.0.1", pair.port)) as connected:
        connected.sendall(CODEC.encode(HELLO))
        for number in range(6):
            message = Prefill(number, "r", make_prompt(60, number), [], GREEDY, 0)
            connected.sendall(CODEC.encode(message))
        wait_for(lambda: pair.server.num_unconfirmed == 6)
    wait_for(lambda: pair.server.num_unconfirmed == 0)
    gate.set()
    wait_for(lambda: pair.prefill.loop.num_waiting + pair.prefill.loop.num_running == 0)
    assert pair.server.counts.read()["failed"] == 6


@every_backend
def test_injected_failures_end_requests_and_nothing_else(new_pair, client, backend):
    pair = new_pair(failure_probability=0.4, backend=backend)
    prompts = [make_prompt(5 + 4 * i) for i in range(24)]
    expected = [a.token_ids for a in client.run(prompts, [GREEDY] * 24)]
    left = dict(enumerate(prompts))
    num_failed = 0
    for _ in range(30):
        answers = dict(zip(left, pair.run(left.values(), [GREEDY] * len(left)), strict=True))
        for index, answer in answers.items():
            if answer.finish_reason == "error":
                num_failed += 1
                assert servers.INJECTED in answer.outputs[-1].error
                assert answer.outputs[-1].failed_peer == pair.address
            else:
                assert answer.token_ids == expected[index]
                del left[index]
        if not left:
            break
    assert not left and num_failed == pair.fetcher.counts.read()["failed"] > 0


def test_a_failed_step_of_the_prefill_worker_fails_its_requests_only(
    new_pair, client, prefill_engine, monkeypatch
):
    pair = new_pair()
    run, fails = prefill_engine.run, iter([True, False, True])
    entered = threading.Event()

    def failing(*args):
        entered.set()
        if next(fails, False):
            raise RuntimeError("injected")
        return run(*args)

    monkeypatch.setattr(prefill_engine, "run", failing)
    prompts = [make_prompt(100, seed) for seed in range(4)]
    answers = pair.run(prompts, [GREEDY] * 4)
    failed = [a for a in answers if a.finish_reason == "error"]
    assert failed and all("injected" in a.outputs[-1].error for a in failed)
    monkeypatch.setattr(prefill_engine, "run", run)
    again = pair.run(prompts, [GREEDY] * 4)
    whole = client.run(prompts, [GREEDY] * 4)
    assert [a.token_ids for a in again] == [a.token_ids for a in whole]


def test_a_failed_step_of_the_decode_worker_has_the_others_fetched_again(
    new_pair, client, decode_engine, monkeypatch
):
    pair = new_pair()
    write, fails = decode_engine.write_pages, iter([False, True])

    def failing(writes):
        if writes and next(fails, False):
            raise RuntimeError("injected")
        write(writes)

    monkeypatch.setattr(decode_engine, "write_pages", failing)
    prompts = [make_prompt(length) for length in (90, 50, 70)]
    answers = pair.run(prompts, [GREEDY] * 3)
    whole = client.run(prompts, [GREEDY] * 3)
    assert [a.token_ids for a in answers] == [a.token_ids for a in whole]
    assert pair.fetcher.counts.read()["started"] > 3


def test_a_prompt_that_does_not_come_is_given_up(new_pair, prefill_engine, monkeypatch):
    pair = new_pair(timeout=0.5)
    gate = threading.Event()
    run = prefill_engine.run
    monkeypatch.setattr(prefill_engine, "run", lambda *args: gate.wait(30) and run(*args))
    answer = pair.run([make_prompt(20)], [GREEDY])[0]
    assert "not done within 0.5 s" in answer.outputs[-1].error
    gate.set()


def test_what_is_lost_when_it_has_arrived_is_not_lost(new_pair, monkeypatch):
    """A deadline may pass between the last page and the loop's next look."""
    pair = new_pair()
    arrivals = pair.fetcher.arrivals

    def with_losses():
        found = arrivals()
        lost = [Lost(a.request, a.incoming, "late", "x") for a in found]
        return [*found, *lost] if any(isinstance(a, ArrivedToken) for a in found) else found

    monkeypatch.setattr(pair.fetcher, "arrivals", with_losses)
    one = dataclasses.replace(GREEDY, max_new_tokens=1)  # over when its first token is there
    answers = pair.run([make_prompt(20), make_prompt(30)], [GREEDY, one])
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


def test_what_was_changed_on_the_way_is_not_used(new_pair, monkeypatch):
    pair = new_pair()
    send = Connection.send

    def corrupting(self, message, *content):
        if isinstance(message, Pages):
            [view] = content
            changed = bytearray(view)
            changed[len(changed) // 2] ^= 1
            content = (memoryview(changed),)
        send(self, message, *content)

    monkeypatch.setattr(Connection, "send", corrupting)
    answer = pair.run([make_prompt(20)], [GREEDY])[0]
    assert "arrived with checksum" in answer.outputs[-1].error
    monkeypatch.setattr(Connection, "send", send)
    assert pair.run([make_prompt(20)], [GREEDY])[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello({"model": "other"}, 128), "model is other there and tiny here"),
        (Hello({"model": "tiny", "x": "1"}, 128), "x is 1 there and absent here"),
        (Hello({"model": "tiny"}, 256), "context length of a decode worker (256)"),
    ],
)
def test_workers_that_do_not_fit_are_refused(new_pair, hello, reason):
    pair = new_pair()
    pair.fetcher.hello = hello
    answer = pair.run([make_prompt(20)], [GREEDY])[0]
    assert reason in answer.outputs[-1].error


class FakePrefill:
    """Says what it is told to, once it has been asked for a prefill."""

    def __init__(self, answers: Callable[[Prefill], list[tuple[Message, bytes]]]):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = format_address(*self._listener.getsockname()[:2])
        self.heard: list[Message] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection = Connection(self._listener.accept()[0], CODEC)
        while (message := connection.receive()) is not None:
            self.heard.append(message)
            if isinstance(message, Hello):
                connection.send(Welcome(""))
            if isinstance(message, Prefill):
                for answer, content in self._answers(message):
                    connection.send(answer, memoryview(content) if content else None)
        connection.close()

    def close(self) -> None:
        self._thread.join(30)
        self._listener.close()


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (lambda n, size: [(Pages(n, 1, 1, size), bytes(size))], "pages 1 to 1 came, 0 was next"),
        (lambda n, size: [(Pages(n, 0, 4, 4 * size), bytes(4 * size))], "pages 0 to 3 came"),
        (
            lambda n, size: [
                (Pages(n, 0, 2, 2 * size), bytes(2 * size)),
                (Prefilled(n, TokenLogprob(5, -1.0), [], 0, 0.0, 0.0), b""),
            ],
            "2 of 3 pages came",
        ),
        (lambda n, size: [(Pages(n, 0, 1, size - 1), bytes(size - 1))], "1 pages have"),
        (lambda n, size: [(Cancel(n), b"")], "cancel is not for a decode worker"),
    ],
)
def test_a_prefill_worker_that_breaks_the_rules(new_pair, decode_engine, answers, reason):
    pair = new_pair()
    block = decode_engine.block
    size = int(np.prod(block.shape[2:])) * block.dtype.itemsize
    fake = FakePrefill(lambda asked: answers(asked.transfer, size))
    answer = pair.submit([make_prompt(20)], [GREEDY], fake.address)[0].wait()
    assert reason in answer.outputs[-1].error
    for link in list(pair.fetcher._links.values()):
        if link.address == fake.address:
            link.close()
    fake.close()
    assert pair.run([make_prompt(20)], [GREEDY])[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("owner", "method"), [(fetchers._Link, "_take_token"), (servers._Client, "_begin")]
)
def test_what_is_unforeseen_ends_a_connection(new_pair, monkeypatch, owner, method):
    """Or requests would wait for a thread that is no more."""
    pair = new_pair()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, lambda *_: 1 / 0)
        answer = pair.run([make_prompt(20)], [GREEDY])[0]
        assert answer.outputs[-1].failed_peer == pair.address
    assert pair.run([make_prompt(20)], [GREEDY])[0].finish_reason == "length"


def test_silence_is_the_end(new_pair, monkeypatch):
    monkeypatch.setattr(fetchers, "SILENCE_SECONDS", 0.5)
    pair = new_pair()
    fake = FakePrefill(lambda asked: [])
    answer = pair.submit([make_prompt(20)], [GREEDY], fake.address)[0].wait()
    assert "its connection ended" in answer.outputs[-1].error
    fake.close()


def test_both_sides_say_now_and_then_that_they_are_there(new_pair, monkeypatch):
    sent: list[Message] = []
    monkeypatch.setattr(servers, "PING_SECONDS", 0.1)
    monkeypatch.setattr(fetchers, "PING_SECONDS", 0.1)
    monkeypatch.setattr(fetchers, "SILENCE_SECONDS", 2.0)
    monkeypatch.setattr(servers, "SILENCE_SECONDS", 2.0)
    pair = new_pair()
    pair.run([make_prompt(20)], [GREEDY])
    monkeypatch.setattr(Connection, "send", spy(Connection.send, sent))
    time.sleep(2.5)
    assert sum(isinstance(message, Ping) for message in sent) >= 10
    pair.run([make_prompt(20)], [GREEDY])
    assert not any(isinstance(message, Hello) for message in sent), "the connection has lasted"


@contextlib.contextmanager
def ends_of(name: str, block: jax.ShapeDtypeStruct, *, timeout: float = 5.0):
    """A sender and its receiver, with the connection on the receiver's side."""
    backend = make_backend(name, "127.0.0.1", block, checksums=True, timeout=timeout)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = Connection(socket.create_connection(listener.getsockname()), CODEC)
        here = Connection(listener.accept()[0], CODEC)
    sender = backend.sender(here)
    receiver = backend.receiver(there, "127.0.0.1", sender.endpoint)
    yield sender, receiver, there
    receiver.close()
    sender.close()
    there.close()
    here.close()


@every_backend
def test_a_block_stays_what_it_is_when_others_follow(decode_engine, backend):
    block = decode_engine.block
    sent = np.random.default_rng(0).standard_normal((12, *block.shape), np.float32)
    counts = [1 + index % block.shape[1] for index in range(len(sent))]
    with ends_of(backend, block) as (sender, receiver, connection):

        def send() -> None:
            for content, count in zip(sent, counts, strict=True):
                sender.send(Pages(0, 0, count), jax.device_put(content, decode_engine.placed_on(0)))

        sending = threading.Thread(target=send)
        sending.start()
        blocks = [receiver.receive(connection.receive(), decode_engine.placed_on(3)) for _ in sent]
        sending.join()
    for content, count, found in zip(sent, counts, blocks, strict=True):
        np.testing.assert_array_equal(np.asarray(found)[:, :count], content[:, :count])
        assert found.sharding == decode_engine.placed_on(3)


@needs_nixl
def test_nixl_gives_up_a_receiver_that_does_not_read(decode_engine):
    block = decode_engine.block
    content = jax.device_put(np.ones(block.shape, np.float32), decode_engine.placed_on(0))
    with ends_of("nixl", block, timeout=0.5) as (sender, receiver, connection):
        for _ in range(nixl.NUM_SLOTS):
            sender.send(Pages(0, 0, 1), content)
        with pytest.raises(OSError, match=r"no pages were read for 0.5 s"):
            sender.send(Pages(0, 0, 1), content)
        receiver.receive(connection.receive(), decode_engine.placed_on(0))
        sender.send(Pages(0, 0, 1), content)


@needs_nixl
def test_nixl_takes_nothing_for_pages_that_is_none(decode_engine):
    block, place = decode_engine.block, decode_engine.placed_on(0)
    content = jax.device_put(np.ones(block.shape, np.float32), place)
    with ends_of("nixl", block) as (sender, receiver, connection):
        for _ in range(2):
            sender.send(Pages(0, 0, 1), content)
        pages = connection.receive()
        receiver.receive(pages, place)
        with pytest.raises(OSError, match="NIXL"):
            receiver.receive(dataclasses.replace(pages, key=pages.key + (1 << 30)), place)
        sender._memory.seals[:] = 0  # as when it has just closed
        with pytest.raises(OSError, match="taken back before they were read"):
            receiver.receive(connection.receive(), place)


def test_written_pages_are_the_ones_read(prefill_engine, decode_engine):
    """Any pages of any ranks at a time, and nothing else changes."""
    rng = np.random.default_rng(0)
    block = decode_engine.block
    decode_engine.reset_cache()
    expected = np.zeros((4, 41, *block.shape[2:]), np.float32)
    writes = []
    for rank, pages in [(0, [3, 1]), (2, [7]), (0, [40, 2, 9]), (3, list(range(10, 30)))]:
        content = rng.standard_normal(block.shape, np.float32)
        writes.append((rank, pages, jax.device_put(content, decode_engine.placed_on(rank))))
        expected[rank, pages] = content[0, : len(pages)]
    decode_engine.write_pages(writes)
    everything = list(range(1, 41))
    for rank, found in enumerate(decode_engine.read_pages([(r, everything) for r in range(4)])):
        np.testing.assert_array_equal(np.asarray(found)[0, :40], expected[rank, 1:])
    decode_engine.reset_cache()


def test_a_request_is_never_in_a_phase_it_cannot_come_to():
    request = Request("r", [1], GREEDY, lambda output: None)
    with pytest.raises(RuntimeError, match="cannot go from"):
        request.move_to(Phase.DECODE)
    for phase in (Phase.TRANSFER, Phase.WAITING, Phase.TRANSFER, Phase.DECODE, Phase.DONE):
        request.move_to(phase)
    with pytest.raises(RuntimeError, match="cannot go from"):
        request.move_to(Phase.TRANSFER)
