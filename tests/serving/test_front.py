"""The front of several members over real sockets: loops in lockstep, with stubs of engines unless
it is the answers that count."""

import asyncio
import contextlib
import dataclasses
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxmoe.tokenizer import Tokenizer
from serving import member as member_module
from serving import wire
from serving.connection import Connection
from serving.front import MemberGroup
from serving.http.app import make_app
from serving.http.calls import Loop
from serving.http.protocol import ModelInfo
from serving.loop import QueueFullError
from serving.member import MemberLink
from serving.metrics import GroupCollector
from serving.rendezvous import Rendezvous, join
from serving.request import Output, Request, SamplingParams, TokenLogprob
from serving.wire import CODEC, Hello, NewRequest, Progress, Refusal, Submit


SHORT = SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True)
ENDLESS = dataclasses.replace(SHORT, max_new_tokens=100_000)
FINGERPRINT = {"model": "tiny", "--page-size": "8"}


class Group:
    """Two members, the second behind a connection, and what its link says at the end."""

    def __init__(self, own, remote, thread_group, max_queued: int):
        with Rendezvous("127.0.0.1", 0) as rendezvous, ThreadPoolExecutor(1) as pool:
            joined = pool.submit(join, rendezvous.address, Hello(1, 2, FINGERPRINT), timeout=10.0)
            connections = rendezvous.gather(2, FINGERPRINT, "group", timeout=30.0)
            self.link_connection, welcome = joined.result(30)
        assert welcome.group_name == "group"
        self.own, self.remote = own, remote
        self.front_connection = connections[0]
        self.front = MemberGroup(own.loop, connections, max_queued=max_queued)
        self.link_result: Future[str | None] = Future()
        link = MemberLink(remote.loop, self.link_connection, remote.registry)

        def serve() -> None:
            result = link.serve()
            if result is not None:
                thread_group.kill(1)  # its process would end
            self.link_result.set_result(result)

        self.front.start()
        threading.Thread(target=serve, daemon=True).start()

    def client(self):
        """Submits to the front."""
        client = type(self.own)(self.front, self.own.registry, [], self.own.engine)
        return client


@pytest.fixture
def start_group(thread_group, new_client, monkeypatch) -> Iterator[Callable[..., Group]]:
    monkeypatch.setattr(member_module, "ABANDON_SECONDS", 0.2)
    started: list[Group] = []

    def start(engines=(None, None), max_queued: int = 100) -> Group:
        own, remote = map(new_client, thread_group.members, engines)
        started.append(Group(own, remote, thread_group, max_queued))
        return started[-1]

    yield start
    for group in started:
        group.front.shutdown()
        result = group.link_result.result(30)
        if thread_group.dead is None:
            assert result is None and group.front.error is None
            group.own.check_free()
            group.remote.check_free()
            assert group.front.num_waiting == group.front.num_running == 0


@pytest.fixture
def group(start_group) -> Group:
    return start_group()


def num_finished(client) -> float:
    return sum(client.metric("finished_reqs_total", reason=r) for r in ("length", "abort"))


def test_the_front_is_what_http_asks_for(group):
    assert isinstance(group.front, Loop)


def test_requests_are_spread_and_outputs_come_in_order(group):
    answers = group.client().run([[1] * n for n in range(1, 9)], [SHORT] * 8)
    for length, answer in enumerate(answers, 1):
        assert answer.token_ids == list(range(length, length + 5))
        assert answer.finish_reason == "length"
    assert (num_finished(group.own), num_finished(group.remote)) == (4, 4)


def test_the_answers_are_those_of_one_loop_alone(start_group, lone_tokens, engine, other_engine):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 256, n).tolist() for n in rng.integers(1, 60, 6)]
    group = start_group((engine, other_engine))
    params = dataclasses.replace(SHORT, logprobs=True)
    answers = group.client().run(prompts, [params] * 6)
    assert [answer.token_ids for answer in answers] == lone_tokens(prompts, params)
    assert num_finished(group.remote) == 3
    assert all(output.logprobs for answer in answers for output in answer.outputs)


def test_a_request_goes_to_the_member_with_the_fewest(group):
    client = group.client()
    endless = client.submit([[1]] * 3, [ENDLESS] * 3)  # 2 and 1
    for answer in endless:
        assert answer.first.wait(30)
    client.run([[1]], [SHORT])
    assert (num_finished(group.own), num_finished(group.remote)) == (0, 1)
    assert group.front.abort(endless[0].request.rid)
    assert endless[0].wait().finish_reason == "abort"
    client.run([[1]], [SHORT])  # a tie
    assert (num_finished(group.own), num_finished(group.remote)) == (2, 1)
    assert group.front.abort_all() == 2
    assert {answer.wait().finish_reason for answer in endless} == {"abort"}


def test_an_abort_finds_its_member(group):
    first, second = group.client().submit([[1], [1]], [ENDLESS] * 2)
    assert first.first.wait(30) and second.first.wait(30)
    assert group.front.abort(second.request.rid)
    assert second.wait().finish_reason == "abort"
    assert not first.ended.is_set()
    assert not group.front.abort(second.request.rid) and not group.front.abort("nobody")
    assert group.front.abort_all() == 1
    assert first.wait().finish_reason == "abort"


def test_the_queue_is_bounded_for_the_whole_group(start_group):
    group = start_group(max_queued=4)
    client, engines = group.client(), (group.own.engine, group.remote.engine)
    for engine in engines:
        engine.may_step.clear()
    running = client.submit([[1]], [SHORT])
    for engine in engines:
        assert engine.entered.wait(30)
    with pytest.raises(QueueFullError, match="0 requests are waiting and 4 may; 5 more do not"):
        client.submit([[1]] * 5, [SHORT] * 5)
    waiting = client.submit([[1]] * 4, [SHORT] * 4)
    assert (group.front.num_waiting, group.front.num_running) == (4, 1)
    with pytest.raises(QueueFullError, match="4 requests are waiting and 4 may; 1 more do not fit"):
        client.submit([[1]], [SHORT])
    for engine in engines:
        engine.may_step.set()
    assert {answer.wait().finish_reason for answer in [*running, *waiting]} == {"length"}


def test_what_is_refused_leaves_nothing_behind(group):
    client = group.client()
    endless = client.submit([[1]] * 2, [ENDLESS] * 2)
    for answer in endless:  # one on each member
        with pytest.raises(ValueError, match=f"rid '{answer.request.rid}' is in use"):
            group.front.submit([Request("new", [1], SHORT, print), answer.request])
    not_unicode = dataclasses.replace(SHORT, stop=("\ud800",))
    with pytest.raises(ValueError, match="surrogates"):
        client.submit([[1]] * 2, [not_unicode] * 2)
    assert group.front.abort_all() == 2
    for answer in endless:
        answer.wait()


def test_flushing(group):
    endless = group.client().submit([[1]] * 2, [ENDLESS] * 2)
    assert endless[0].first.wait(30) and endless[1].first.wait(30)
    with pytest.raises(RuntimeError, match="2 requests are being served"):
        group.front.flush_cache()
    group.front.abort_all()
    for answer in endless:
        answer.wait()
    group.front.flush_cache()


def test_shutdown_lets_requests_finish_and_ends_all_members(group):
    answers = group.client().submit([[1]] * 10, [SHORT] * 10)
    group.front.shutdown(drain_timeout=60.0)
    assert {answer.wait(0).finish_reason for answer in answers} == {"length"}
    assert group.link_result.result(30) is None
    with pytest.raises(RuntimeError, match="shutting down"):
        group.client().submit([[1]], [SHORT])
    with pytest.raises(RuntimeError, match="shutting down"):
        group.front.flush_cache()


def test_shutdown_ends_what_does_not_finish_in_time(group):
    answers = group.client().submit([[1]] * 10, [ENDLESS] * 10)
    group.front.shutdown()
    assert {answer.wait(0).finish_reason for answer in answers} == {"abort"}


@pytest.mark.parametrize("side", ["front", "link"])
def test_a_lost_connection_ends_all_and_every_request_hears_of_it(group, side):
    answers = group.client().submit([[1]] * 4, [ENDLESS] * 4)
    for answer in answers:
        assert answer.first.wait(30)
    connection = group.front_connection if side == "front" else group.link_connection
    connection._socket.shutdown(socket.SHUT_RDWR)
    assert "member 0 is gone" in group.link_result.result(30)
    for index, answer in enumerate(answers):
        assert answer.wait().finish_reason == "error"
        if index % 2 == 1:
            assert f"member 1 at {group.front_connection.peer} is gone" in answer.outputs[-1].error
    assert "member 1" in group.front.error
    with pytest.raises(RuntimeError, match="has stopped: member 1"):
        group.client().submit([[1]], [SHORT])
    with pytest.raises(RuntimeError, match="has stopped: member 1"):
        group.front.flush_cache()


def test_a_dead_loop_of_another_member_is_heard_of(group):
    group.remote.engine.fails = True
    answers = group.client().submit([[1]] * 4, [ENDLESS] * 4)
    assert {answer.wait().finish_reason for answer in answers} == {"error"}
    assert "3 steps in a row failed" in group.link_result.result(30)
    group.own.loop._thread.join(30)
    assert "member 1" in group.front.error
    with pytest.raises(RuntimeError, match="has stopped"):
        group.client().submit([[1]], [SHORT])


def test_members_hear_why_the_front_has_stopped(group):
    """Not only that its connection ended: the cause may be a third member."""
    group.own.loop.abandon("member 2 is gone")
    reason = "member 0 has stopped: RuntimeError: member 2 is gone"
    assert reason in group.link_result.result(30)
    assert "member 2 is gone" in group.front.error


def test_metrics_of_all_members_are_shown_together(group):
    group.client().run([[1]] * 3, [SHORT] * 3)
    shown = CollectorRegistry()
    shown.register(GroupCollector(group.own.registry, group.front.member_metrics))
    text = generate_latest(shown).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    samples = {
        (sample.name, sample.labels.pop("member"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["jaxmoe_generation_tokens_total", "0"] == 10
    assert samples["jaxmoe_generation_tokens_total", "1"] == 5
    assert samples["jaxmoe_finished_reqs_total", "1", ("reason", "length")] == 1
    assert samples["jaxmoe_step_seconds_bucket", "1", ("le", "+Inf"), ("phase", "prefill")] >= 1
    names = {key[0] for key in samples}
    assert names == {
        sample.name
        for family in text_string_to_metric_families(generate_latest(group.own.registry).decode())
        for sample in family.samples
    }


def test_metrics_without_an_answer_are_left_out(group):
    group.remote.registry.collect = lambda: (threading.Event().wait(0.2), iter(()))[1]
    assert group.front.member_metrics(timeout=0.0) == {}
    assert list(group.front.member_metrics(timeout=30.0)) == [1]


def test_http_serves_the_group(group):
    tokenizer = Tokenizer.load(Path(__file__).parent.parent / "byte_tokenizer")
    info = ModelInfo("tiny", "tiny", vocab_size=1000, context_length=100, eos_token_ids=(1,))
    shown = CollectorRegistry()
    shown.register(GroupCollector(group.own.registry, group.front.member_metrics))
    app = make_app(group.front, tokenizer, info, shown)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            body = {"input_ids": [[5], [6, 7]], "sampling_params": {"max_new_tokens": 2}}
            return [
                await client.get("/health"),
                await client.get("/health_generate"),
                await client.post("/generate", json=body),
                await client.post("/flush_cache"),
                await client.get("/metrics"),
            ]

    responses = asyncio.run(ask())
    assert [response.status_code for response in responses] == [200] * 5
    assert [item["output_ids"] for item in responses[2].json()] == [[1], [2, 3]]
    assert 'jaxmoe_prompt_tokens_total{member="1"} 2.0' in responses[4].text


def test_messages_come_back_as_they_were():
    params = SamplingParams(
        seed=2**64 - 1, stop=("\n", "é"), stop_token_ids=frozenset({3}), logit_bias={3: -math.inf}
    )
    logprobs = (TokenLogprob(1, -math.inf, ((1, -0.1),)), TokenLogprob(2, None))
    for message in (
        Submit([NewRequest("a", [1, 2], params)]),
        Progress("a", Output("a\n", (1, 2), logprobs, finish_reason="stop", matched_stop="b")),
        Progress("a", Output(finish_reason="stop", matched_stop=3)),
        wire.State(3, 2, 1, "no"),
    ):
        line = CODEC.encode(message)
        assert line.count(b"\n") == 1
        assert CODEC.decode(line) == message
    for line in (b"\n", b"[]\n", b'{"kind": "goodbye"}\n', b'{"kind": "abort"}\n'):
        with pytest.raises(ValueError):
            CODEC.decode(line)


def test_sending_does_not_wait_for_a_peer_that_does_not_read():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        connection = Connection(socket.create_connection(listener.getsockname()), CODEC)
        accepted, _ = listener.accept()
        for number in range(20):
            connection.send(wire.Metrics(number, "x" * 1_000_000))
        peer = Connection(accepted, CODEC)
        connection.finish()
        for number in range(20):
            received = peer.receive()
            assert isinstance(received, wire.Metrics) and received.number == number
        assert peer.receive() is None and connection.receive() is None
        peer.close()
        connection.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(3, 3, FINGERPRINT), "--node-rank must be between 1 and 2 .* got 3"),
        (Hello(0, 3, FINGERPRINT), "--node-rank must be between 1 and 2 .* got 0"),
        (Hello(1, 2, FINGERPRINT), "--nnodes is 2 there and 3 on node rank 0"),
        (
            Hello(1, 3, {"model": "large", "--dtype": "auto"}),
            "--dtype is auto there and absent here; --page-size is absent there and 8 here; "
            "model is large there and tiny here",
        ),
    ],
)
def test_a_node_that_does_not_fit_is_refused_in_words(hello, reason):
    with Rendezvous("127.0.0.1", 0) as rendezvous, ThreadPoolExecutor(4) as pool:
        gathered = pool.submit(rendezvous.gather, 3, FINGERPRINT, "group", timeout=60.0)
        with pytest.raises(ValueError, match=f"refused by node rank 0 at 127.0.0.1:.*{reason}"):
            join(rendezvous.address, hello, timeout=30.0)
        # The others still find it.
        good = [
            pool.submit(join, rendezvous.address, Hello(rank, 3, FINGERPRINT), timeout=30.0)
            for rank in (2, 1)
        ]
        close_all(gathered.result(60), [future.result(60)[0] for future in good])


def test_a_taken_node_rank_is_refused():
    with Rendezvous("127.0.0.1", 0) as rendezvous, ThreadPoolExecutor(4) as pool:
        gathered = pool.submit(rendezvous.gather, 3, FINGERPRINT, "group", timeout=60.0)
        hello = Hello(1, 3, FINGERPRINT)
        twice = [pool.submit(join, rendezvous.address, hello, timeout=30.0) for _ in range(2)]
        refused = ask_until(twice)
        with pytest.raises(ValueError, match="node rank 1 is taken by another node"):
            refused.result()
        third = pool.submit(join, rendezvous.address, Hello(2, 3, FINGERPRINT), timeout=30.0)
        twice.remove(refused)
        close_all(gathered.result(60), [future.result(60)[0] for future in (*twice, third)])


def test_a_node_that_leaves_makes_room_and_noise_is_refused():
    with Rendezvous("127.0.0.1", 0) as rendezvous, ThreadPoolExecutor(2) as pool:
        gathered = pool.submit(rendezvous.gather, 3, FINGERPRINT, "group", timeout=60.0)
        leaver = socket.create_connection(rendezvous.address)
        leaver.sendall(CODEC.encode(Hello(1, 3, FINGERPRINT)))
        leaver.close()
        for noise in (b"GET / HTTP/1.0\r\n\r\n", CODEC.encode(wire.Shutdown()), b"x" * 100_000):
            with contextlib.closing(socket.create_connection(rendezvous.address)) as other:
                with contextlib.suppress(OSError):  # it may hang up before all is sent
                    other.sendall(noise)
                    answer = other.makefile("rb").readline()
                    assert isinstance(CODEC.decode(answer), Refusal)
        joined = pool.submit(join, rendezvous.address, Hello(1, 3, FINGERPRINT), timeout=30.0)
        last, _ = join(rendezvous.address, Hello(2, 3, FINGERPRINT), timeout=30.0)
        close_all(gathered.result(60), [joined.result(60)[0], last])


def test_missing_nodes_are_named():
    with Rendezvous("127.0.0.1", 0) as rendezvous:
        with contextlib.closing(socket.create_connection(rendezvous.address)) as other:
            other.sendall(CODEC.encode(Hello(2, 4, FINGERPRINT)))
            with pytest.raises(TimeoutError, match=r"node ranks 1, 3 of 4 did not connect to 127"):
                rendezvous.gather(4, FINGERPRINT, "group", timeout=1.0)


def test_a_node_that_is_not_admitted_in_time_says_so():
    with Rendezvous("127.0.0.1", 0) as rendezvous:
        address = rendezvous.address
        with pytest.raises(TimeoutError, match=r"within 0\.3 s: no answer"):
            join(address, Hello(1, 2, FINGERPRINT), timeout=0.3)
    with pytest.raises(TimeoutError, match=r"not admitted by node rank 0 at 127.*refused"):
        join(address, Hello(1, 2, FINGERPRINT), timeout=0.3)


def test_a_node_may_be_started_before_node_rank_0():
    with Rendezvous("127.0.0.1", 0) as rendezvous:
        address = rendezvous.address
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(join, address, Hello(1, 2, FINGERPRINT), timeout=60.0)
        with Rendezvous(*address) as rendezvous:
            with pytest.raises(ValueError, match="cannot listen on"):
                Rendezvous(*address)
            close_all(rendezvous.gather(2, FINGERPRINT, "group"), [joined.result(60)[0]])


def ask_until(futures: list[Future]) -> Future:
    """The first of these that is done."""
    done = threading.Event()
    for future in futures:
        future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    return next(future for future in futures if future.done())


def close_all(ours: list[Connection], theirs: list[Connection]) -> None:
    for connection in [*ours, *theirs]:
        connection.finish()
    for connection in [*ours, *theirs]:
        connection.close()
