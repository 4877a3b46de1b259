"""The router over real sockets, in front of workers that do what a test says."""

import asyncio
import json
import random
import time

import httpx
import pytest

from serving.router.pool import State
from tests.serving.router.fakes import FAST, Asked, FakeWorker, break_off, hang, routed, started


pytestmark = pytest.mark.anyio

DONE = b"data: [DONE]\n\n"


@pytest.fixture
def anyio_backend():
    return "asyncio"


def prefills(count=1):
    return [FakeWorker("prefill", f"p{index}") for index in range(count)]


def decodes(count=1):
    return [FakeWorker("decode", f"d{index}") for index in range(count)]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


def refuse(status: int = 503, **headers: str):
    async def script(asked: Asked) -> None:
        await asked.answer({"error": {"message": "no"}}, status, **headers)

    return script


async def failed_peer(asked: Asked) -> None:
    """A decode worker that cannot get anything from the prefill worker it is told."""
    (address,) = asked.header("x-prefill-address")
    await asked.answer({"error": {}}, 503, X_Failed_Peer=address, Retry_After="1")


async def one_event_then(asked: Asked, first: bytes) -> None:
    await asked.begin_events()
    await asked.chunk(first)
    asked.break_off()


# What passes through


async def test_requests_and_answers_pass_through_as_they_are():
    """The body byte for byte, query and headers, and the address of the prefill worker."""
    body = b' {"text": "\\u00e9 \xc3\xa9",  "n":1} '
    headers = {
        "X-Prefill-Address": "evil:1", "X-Mine": "yes", "Connection": "x-hop", "X-Hop": "1",
        "Accept-Encoding": "zstd",
    }  # fmt: skip
    async with routed(prefills(), [worker := FakeWorker("decode", "d")]) as router:
        worker.script = lambda asked: asked.answer(b"\x00\xff plain", content_type="x/y", x_own="1")
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            target = f"{path}?a=%2F&b"
            response = await router.client.post(target, content=body, headers=headers)
            assert (response.status_code, response.content) == (200, b"\x00\xff plain")
            assert response.headers["content-type"] == "x/y" and response.headers["x-own"] == "1"
            asked = worker.asked.pop()
            assert (asked.method, asked.target, asked.body) == ("POST", target, body)
            assert asked.header("x-prefill-address") == ["p0:8998"]
            assert asked.header("x-mine") == ["yes"] and asked.header("x-hop") == []
            assert asked.header("host") == [f"127.0.0.1:{worker.port}"]
            assert asked.header("accept-encoding") == ["zstd"]


async def test_the_model_is_a_decode_workers():
    async with routed(decode=[worker := FakeWorker("decode", "d")]) as router:
        for path in ("/v1/models", "/v1/models/a/b%20c", "/get_model_info"):
            assert (await router.client.get(path)).json()["worker"] == "d"
            asked = worker.asked.pop()
            assert (asked.method, asked.target) == ("GET", path)
            assert asked.header("x-prefill-address") == []


async def test_statuses_but_503_are_passed_on():
    async with routed(prefills(), decodes(2)) as router:
        for status in (200, 400, 404, 422, 429, 500, 502):
            for worker in router.workers:
                worker.script = refuse(status)
            response = await router.post()
            assert response.status_code == status
            assert response.json() == {"error": {"message": "no"}}
        assert await router.metric("jaxmoe_router_retries_total") == 0


async def test_streams_pass_through_unbuffered_and_byte_for_byte():
    may_go_on = asyncio.Event()

    async def script(asked: Asked) -> None:
        await asked.begin_events()
        await asked.chunk(event("1"))
        await may_go_on.wait()
        await asked.chunk(b'data: {"text"')
        await asked.chunk(b': "2"}\n\n' + DONE)
        await asked.chunk(b"")

    async with routed(prefills(), decodes()) as router:
        router.workers[1].script = script
        async with router.client.stream("POST", "/generate", json={"text": "a"}) as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            chunks = response.aiter_raw()
            assert await anext(chunks) == event("1"), "though nothing else has been sent"
            may_go_on.set()
            assert b"".join([chunk async for chunk in chunks]) == event("2") + DONE


# What fails


async def test_a_dead_decode_worker_is_replaced_and_returns_when_it_recovers():
    dead, alive = decodes(2)
    async with routed(prefills(), [dead, alive]) as router:
        await dead.kill()
        for _ in range(4):
            assert (await router.post()).json()["worker"] == "d1"
        assert router.state(dead) is not State.ONLINE
        assert await router.metric('jaxmoe_router_retries_total{reason="connection"} ') == 1
        await dead.start()
        await router.wait_until(lambda: router.state(dead) is State.ONLINE)
        assert {(await router.post()).json()["worker"] for _ in range(2)} == {"d0", "d1"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_breaks_before_the_first_byte_goes_elsewhere(is_stream):
    async def script(asked: Asked) -> None:
        if is_stream:
            await asked.begin_events()
        asked.break_off()

    async with routed(prefills(), decodes(2)) as router:
        router.workers[1].script = script
        assert (await router.post()).json()["worker"] == "d1"
        assert router.worker(router.workers[1]).num_failures == 1


async def test_when_no_decode_worker_is_left_the_last_failure_is_told():
    async with routed(prefills(), decodes()) as router:
        router.workers[1].script = break_off
        response = await router.post()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        message = response.json()["error"]["message"]
        assert message.startswith(f"decode worker {router.workers[1].url} failed: ")


async def test_a_failed_peer_is_replaced_by_another_and_suspect():
    async with routed(prefills(2), decodes()) as router:
        first, _, worker = router.workers

        async def script(asked: Asked) -> None:
            is_first = asked.header("x-prefill-address") == ["p0:8998"]
            await (failed_peer if is_first else worker.echo)(asked)

        worker.script = script
        assert (await router.post()).json()["prefill"] == ["p1:8998"]
        failures = [router.worker(each).num_failures for each in router.workers]
        assert failures == [1, 0, 0]
        assert await router.metric('jaxmoe_router_retries_total{reason="failed_peer"} ') == 1
        await router.wait_until(lambda: router.state(first) is State.ONLINE)


@pytest.mark.parametrize(
    ("num_prefill", "max_retries", "num_asked"), [(1, 2, 1), (2, 2, 2), (4, 2, 3), (4, 0, 1)]
)
async def test_retries_are_bounded_and_the_last_503_passed_on(num_prefill, max_retries, num_asked):
    async with routed(prefills(num_prefill), decodes(), max_retries=max_retries) as router:
        worker = router.workers[-1]
        worker.script = failed_peer
        response = await router.post()
        assert response.status_code == 503
        addresses = [asked.header("x-prefill-address")[0] for asked in worker.asked]
        assert len(set(addresses)) == len(addresses) == num_asked
        assert response.headers["x-failed-peer"] == addresses[-1]


async def test_a_full_queue_is_no_failure_and_another_worker_is_tried():
    async with routed(prefills(), decodes(2)) as router:
        full = router.workers[1]
        full.script = refuse(503, Retry_After="7")
        assert [(await router.post()).json()["worker"] for _ in range(3)] == ["d1"] * 3
        assert router.state(full) is State.ONLINE
        router.workers[2].script = refuse(503, Retry_After="9")
        response = await router.post()
        assert response.status_code == 503 and response.headers["retry-after"] in "79"
        assert await router.metric('jaxmoe_router_retries_total{reason="queue_full"} ') >= 2


async def test_a_503_that_promises_nothing_is_a_worker_that_is_gone():
    async with routed(prefills(), decodes(2)) as router:
        router.workers[1].script = refuse()
        assert (await router.post()).json()["worker"] == "d1"
        assert router.worker(router.workers[1]).num_failures == 1


@pytest.mark.parametrize("cut", [b"", b'data: {"te'])
async def test_a_stream_that_breaks_says_so_in_a_last_event(cut):
    async with routed(prefills(), decodes(2)) as router:
        worker = router.workers[1]
        worker.script = lambda asked: one_event_then(asked, event("1") + cut)
        response = await router.post()
        assert response.status_code == 200
        assert response.content.startswith(event("1") + cut) and response.content.endswith(DONE)
        *_, last, done, rest = response.content.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["message"].startswith(f"decode worker {worker.url} failed: ")
        assert router.workers[2].asked == [] and router.worker(worker).num_failures == 1


async def test_a_stream_that_breaks_after_its_end_is_whole():
    async with routed(prefills(), decodes()) as router:
        router.workers[1].script = lambda asked: one_event_then(asked, event("1") + DONE)
        assert (await router.post()).content == event("1") + DONE


async def test_a_whole_answer_that_breaks_is_502():
    async def script(asked: Asked) -> None:
        await asked.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        asked.break_off()

    async with routed(prefills(), decodes(2)) as router:
        router.workers[1].script = script
        response = await router.post()
        assert response.status_code == 502 and response.json()["error"]["type"] == "bad_gateway"
        assert router.workers[2].asked == []


async def test_a_silent_worker_is_given_up_after_the_request_timeout():
    async with routed(prefills(), decodes(2), request_timeout=0.1) as router:
        router.workers[1].script = hang
        response = await router.post()
        assert response.status_code == 504 and router.workers[2].asked == []
        assert router.worker(router.workers[1]).num_failures == 1
        await router.wait_until(lambda: router.workers[1].num_left == 1)


async def test_two_polls_without_an_answer_take_a_worker_out():
    async with routed(prefills(), decodes()) as router:
        worker = router.workers[0]
        good = worker.status
        worker.status = "something else"
        await router.wait_until(lambda: router.state(worker) is State.OFFLINE)
        assert "GET /disaggregation failed: ValidationError" in router.worker(worker).error
        worker.status = good
        await router.wait_until(lambda: router.state(worker) is State.ONLINE)


# Clients that leave


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_ends_its_request_at_the_worker(has_begun):
    async def script(asked: Asked) -> None:
        if has_begun:
            await asked.begin_events()
            await asked.chunk(event("1"))
        await hang(asked)

    async with routed(prefills(), decodes()) as router:
        worker = router.workers[1]
        worker.script = script
        client = asyncio.create_task(router.post())
        await router.wait_until(lambda: len(worker.asked) == 1)
        if has_begun:
            await asyncio.sleep(0.05)
        client.cancel()
        await router.wait_until(lambda: worker.num_left == 1, seconds=1)
        await router.wait_until(lambda: not any(w.num_requests for w in router.pool.workers()))
        assert router.state(worker) is State.ONLINE
        status = 200 if has_begun else 499
        line = f'jaxmoe_http_requests_total{{endpoint="/generate",status="{status}"}} '
        assert await router.metric(line) == 1


# Who gets requests


async def test_no_workers():
    async with routed() as router:
        response = await router.post()
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        message = "no prefill worker and no decode worker is online"
        assert response.json()["error"]["message"] == message
        health = await router.client.get("/health")
        assert health.status_code == 503 and message in health.text
        assert (await router.client.get("/v1/models")).status_code == 503
        assert (await router.client.get("/health_generate")).status_code == 503
        assert (await router.client.get("/servers")).json() == {"servers": []}


async def test_health_says_what_is_missing():
    async with routed(decode=decodes()) as router:
        response = await router.client.get("/health")
        assert response.status_code == 503 and "no prefill worker is online" in response.text
        assert "decode" not in response.json()["error"]["message"]
        assert (await router.post()).status_code == 503
        assert router.workers[0].asked == []


async def test_health_generate_goes_the_whole_way():
    async with routed(prefills(), decodes()) as router:
        assert (await router.client.get("/health")).status_code == 200
        assert (await router.client.get("/health_generate")).status_code == 200
        (asked,) = router.workers[1].asked
        assert json.loads(asked.body)["sampling_params"]["max_new_tokens"] == 1
        assert asked.header("x-prefill-address") == ["p0:8998"]
        router.workers[1].script = refuse(500)
        assert (await router.client.get("/health_generate")).status_code == 503


async def test_a_static_worker_of_the_wrong_mode_is_never_used(caplog):
    wrong = FakeWorker("decode", "wrong")
    async with routed([wrong], decodes()) as router:
        assert (await router.post()).status_code == 503
        assert wrong.asked == [] and router.state(wrong) is State.OFFLINE
    assert f"prefill worker {wrong.url} is offline: its mode is decode" in caplog.text


async def test_draining_workers_get_nothing_new():
    async with routed(prefills(), decodes(2)) as router:
        router.workers[1].status |= {"draining": True}
        await router.wait_until(lambda: router.state(router.workers[1]) is State.DRAINING)
        assert [(await router.post()).json()["worker"] for _ in range(3)] == ["d1"] * 3


async def test_load_is_spread_by_what_is_under_way():
    async with routed(prefills(2), decodes(2), policy="least_load") as router:
        busy, idle = router.workers[2:]
        busy.status |= {"num_running": 3}
        await router.wait_until(lambda: router.worker(busy).num_others == 3)
        idle.script = hang
        clients = [asyncio.create_task(router.post()) for _ in range(3)]
        await router.wait_until(lambda: len(idle.asked) == 3)
        assert {asked.header("x-prefill-address")[0] for asked in idle.asked} == {
            "p0:8998", "p1:8998"
        }  # fmt: skip
        line = f'jaxmoe_router_worker_in_flight{{role="decode",worker="{idle.url}"}} '
        assert await router.metric(line) == 3
        for client in clients:
            client.cancel()
        await router.wait_until(lambda: idle.num_left == 3)


async def test_prompts_that_start_alike_go_to_the_same_prefill_worker():
    async with routed(prefills(3), decodes(), policy="cache_aware") as router:
        for subject in "abc":
            used = set()
            for question in range(4):
                messages = [{"role": "user", "content": subject * 2000 + str(question)}]
                response = await router.post("/v1/chat/completions", json={"messages": messages})
                used.add(response.json()["prefill"][0])
            assert len(used) == 1


# Registration


async def register(router, worker, **changed):
    values = {
        "mode": worker.status["mode"], "url": worker.url,
        "transfer_address": worker.status["transfer_address"],
    }  # fmt: skip
    return await router.client.post("/register", json=values | changed)


async def test_workers_register_beat_and_are_dropped_when_they_stop():
    async with routed(prefills()) as router, started("decode") as worker:
        assert (await register(router, worker)).status_code == 200
        assert (await router.post()).json()["prefill"] == ["p0:8998"]
        for _ in range(4):
            await asyncio.sleep(FAST.silence / 3)
            assert (await register(router, worker)).status_code == 200
        assert router.state(worker) is State.ONLINE
        await router.wait_until(lambda: router.state(worker) is None)
        assert (await router.post()).status_code == 503


async def test_workers_deregister():
    async with routed() as router, started("prefill") as worker:
        await register(router, worker)
        assert router.state(worker) is State.ONLINE
        response = await router.client.post("/deregister", json={"url": worker.url + "/"})
        assert response.status_code == 200 and router.state(worker) is None


async def test_false_registrations_are_refused():
    async with routed() as router, started("decode") as worker:
        for changed, status, message in (
            ({"mode": "prefill"}, 400, "registers as prefill, but its mode is decode"),
            ({"mode": "null"}, 400, "mode: Input should be 'prefill' or 'decode', got 'null'"),
            ({"url": "nowhere"}, 400, "url: a worker's URL is http://HOST:PORT, got 'nowhere'"),
            ({"transfer_address": "d:1"}, 400, "registers with transfer address d:1"),
            ({"url": "http://127.0.0.1:9"}, 503, "/disaggregation failed: ConnectError"),
        ):
            response = await register(router, worker, **changed)
            assert response.status_code == status
            assert message in response.json()["error"]["message"]
            assert router.pool.workers() == []


# What goes to all workers


async def test_aborts_go_to_all_decode_workers():
    async with routed(prefills(), decodes(3)) as router:
        prefill, *workers = router.workers
        for count, worker in enumerate(workers):
            worker.script = lambda asked, count=count: asked.answer({"num_aborted": count})
        response = await router.post("/abort_request", content=b'{"rid": "a"}')
        assert response.json() == {"num_aborted": 3}
        assert [worker.asked[0].body for worker in workers] == [b'{"rid": "a"}'] * 3
        assert prefill.asked == []
        await workers[2].kill()
        response = await router.post("/abort_request", content=b"{}")
        assert response.json() == {"num_aborted": 1}
        workers[0].script = workers[1].script = refuse(400)
        response = await router.post("/abort_request", content=b"{}")
        assert (response.status_code, response.json()) == (400, {"error": {"message": "no"}})


async def test_caches_are_flushed_at_all_workers():
    async with routed(prefills(2), decodes(1)) as router:
        assert (await router.post("/flush_cache", content=b"")).json() == {"status": "flushed"}
        assert [len(worker.asked) for worker in router.workers] == [1, 1, 1]
        router.workers[1].script = refuse(400)
        response = await router.post("/flush_cache", content=b"")
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert message.startswith(f"{router.workers[1].url}: 400 ") and message.count("http") == 1
        router.workers[1].script = break_off
        assert (await router.post("/flush_cache", content=b"")).status_code == 502


async def test_servers_and_metrics_show_each_worker():
    async with routed(prefills(), decodes()) as router:
        router.workers[1].status |= {"num_running": 2}
        await router.wait_until(lambda: router.worker(router.workers[1]).num_others == 2)
        await router.post()
        shown = (await router.client.get("/servers")).json()["servers"]
        assert [(s["role"], s["state"], s["load"]) for s in shown] == [
            ("prefill", "online", 0), ("decode", "online", 2)
        ]  # fmt: skip
        assert shown[0]["transfer_address"] == "p0:8998" and shown[1]["num_failures"] == 0
        assert await router.metric("jaxmoe_router_first_byte_seconds_count ") == 1
        line = f'jaxmoe_router_worker_online{{role="prefill",worker="{router.workers[0].url}"}} '
        assert await router.metric(line) == 1
        line = 'jaxmoe_http_requests_total{endpoint="/generate",status="200"} '
        assert await router.metric(line) == 1


async def test_what_is_no_prompt_is_the_workers_to_judge():
    async with routed(prefills(), decodes(), policy="cache_aware") as router:
        for body in (b"", b"\xff", b"[1]", b"[" * 100_000, b'{"text": 1}'):
            assert (await router.post(content=body)).status_code == 200
            assert router.workers[1].asked.pop().body == body


async def test_unknown_paths_and_large_bodies(monkeypatch):
    async with routed(prefills(), decodes()) as router:
        assert (await router.post("/v1/embeddings")).status_code == 404
        monkeypatch.setattr("serving.http.base.MAX_BODY_BYTES", 100)
        assert (await router.post(content=b"a" * 101)).status_code == 413


# All at once


async def test_200_requests_with_a_worker_killed_among_them_all_end():
    rng = random.Random(0)

    def slow(worker: FakeWorker):
        async def script(asked: Asked) -> None:
            await asyncio.sleep(rng.uniform(0, 0.05))
            if not json.loads(asked.body)["stream"]:
                await worker.echo(asked)
                return
            await asked.begin_events()
            for _ in range(3):
                await asked.chunk(event("x"))
                await asyncio.sleep(rng.uniform(0, 0.02))
            await asked.chunk(DONE)
            await asked.chunk(b"")

        return script

    async with routed(prefills(2), decodes(2), policy="cache_aware") as router:
        for worker in router.workers[2:]:
            worker.script = slow(worker)
        killed = router.workers[2]

        async def ask(index: int) -> httpx.Response:
            await asyncio.sleep(index * 0.003)
            if index == 100:
                await killed.kill()
            return await router.post(json={"text": f"{index % 7}" * 600, "stream": index % 2 == 0})

        started = time.monotonic()
        responses = await asyncio.gather(*map(ask, range(200)))
        assert time.monotonic() - started < 10
        statuses = [response.status_code for response in responses]
        assert all(status == 200 or status >= 500 for status in statuses)
        # Only what was in the middle of a stream when the worker died is lost, and says so.
        assert statuses.count(200) == 200
        streams = [response.content for response in responses[::2]]
        assert all(content.endswith(DONE) for content in streams)
        broken = [content for content in streams if b'"error"' in content]
        assert len(broken) <= 30
        assert not any(worker.num_requests for worker in router.pool.workers())
        await killed.start()
        await router.wait_until(lambda: router.state(killed) is State.ONLINE)
