"""Members that step together: two loops with an engine each, as threads of one process."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.engine import Engine
from serving.peers import Alone, Peers
from serving.request import Output, Request, SamplingParams


GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


def make_prompts(count: int, longest: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, 256, n).tolist() for n in rng.integers(1, longest, count)]


class Recorder:
    """Notes the steps of an engine, and fails the one it is told to."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[tuple[str, int]] = []
        self.num_empty = 0
        self.fail_at: int | None = None
        self._run = engine.run
        monkeypatch.setattr(engine, "run", self.run)

    def run(self, batch, size):
        self.steps.append((type(batch).__name__, size))
        self.num_empty += not batch.all_requests
        results = self._run(batch, size)
        if len(self.steps) == self.fail_at:
            raise RuntimeError("injected")
        return results


@pytest.fixture
def recorders(clients, engine, other_engine, monkeypatch) -> list[Recorder]:
    return [Recorder(engine, monkeypatch), Recorder(other_engine, monkeypatch)]


def test_peers_is_what_the_loop_asks_for(thread_group):
    assert isinstance(Alone(), Peers)
    assert isinstance(thread_group.members[1], Peers)


def test_alone_waits_until_woken():
    peers = Alone()
    assert peers.agree((1, 2)) == [(1, 2)]
    peers.wake()
    peers.wait()
    waiting = threading.Thread(target=peers.wait)
    waiting.start()
    peers.wake()
    waiting.join(10)
    assert not waiting.is_alive()


def test_members_step_in_lockstep_and_answer_as_one_would(lone_tokens, clients, recorders):
    prompts = make_prompts(14)
    alone = lone_tokens(prompts, GREEDY)
    for recorder in recorders:
        recorder.steps.clear()
    # Of different work: the first member has most of it.
    answers = clients[1].submit(prompts[:3], [GREEDY] * 3)
    answers += clients[0].submit(prompts[3:], [GREEDY] * 11)
    assert [answer.wait().token_ids for answer in answers] == alone
    assert recorders[0].steps == recorders[1].steps
    phases = {name for name, _ in recorders[0].steps}
    assert phases == {"ScheduledPrefill", "ScheduledDecode"}


def test_a_member_without_requests_takes_part(clients, recorders):
    answer = clients[1].run([[5, 6, 7]], [GREEDY])[0]
    assert answer.finish_reason == "length"
    assert recorders[0].steps == recorders[1].steps
    assert recorders[0].num_empty == len(recorders[0].steps) == GREEDY.max_new_tokens
    assert recorders[1].num_empty == 0


def test_flushing_is_refused_while_another_member_serves(clients, recorders):
    answer = clients[1].submit([[2, 3]], [dataclasses.replace(GREEDY, max_new_tokens=100)])[0]
    answer.first.wait(60)
    with pytest.raises(RuntimeError, match="1 requests are being served"):
        clients[0].loop.flush_cache()
    clients[1].loop.abort_all()
    answer.wait()
    clients[0].loop.flush_cache()
    assert clients[1].run([[2, 3]], [GREEDY])[0].finish_reason == "length"


def test_members_keep_caches_of_their_own_and_flush_them_together(clients, recorders):
    prompts = make_prompts(4)
    prompts = [prompt + [9] * 17 for prompt in prompts]

    def cached(member: int) -> list[int]:
        answers = [clients[member].run([prompt], [GREEDY])[0] for prompt in prompts]
        return [answer.outputs[0].cached_tokens for answer in answers]

    pages = [(len(prompt) - 1) // 8 * 8 for prompt in prompts]
    assert cached(0) == cached(1) == [0] * 4
    assert cached(0) == cached(1) == pages
    clients[1].loop.flush_cache()
    assert cached(0) == cached(1) == [0] * 4
    assert recorders[0].steps == recorders[1].steps


def test_all_members_recover_from_a_step_that_failed_on_one(clients, recorders, thread_group):
    prompts = make_prompts(4)
    expected = [clients[0].run([prompt], [GREEDY])[0].token_ids for prompt in prompts]
    recorders[1].fail_at = len(recorders[1].steps) + 3
    victims = clients[1].submit(prompts, [GREEDY] * 4)
    others = clients[0].submit(prompts, [GREEDY] * 4)
    for answer, tokens in zip([*victims, *others], 2 * expected, strict=True):
        if answer.wait().finish_reason == "error":
            assert answer in victims and answer.outputs[-1].error == "RuntimeError: injected"
        else:
            assert answer.token_ids == tokens
    assert "error" in {answer.finish_reason for answer in victims}
    assert clients[1].run([prompts[0]], [GREEDY])[0].token_ids == expected[0]
    assert thread_group.num_recoveries == [1, 1]
    assert recorders[0].steps == recorders[1].steps


def test_a_shutdown_under_load_waits_for_all_members(clients, shut_down):
    long = dataclasses.replace(GREEDY, max_new_tokens=100)
    answers = [answer for client in clients for answer in client.submit([[2, 3]] * 10, [long] * 10)]
    answers[-1].first.wait(60)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(clients[0].loop.shutdown)
        for answer in answers[:10]:
            assert answer.wait().finish_reason == "abort"
        # The other member is still served, so the first must still be there.
        num_tokens = len(answers[-1].token_ids)
        assert clients[1].run([[7]], [GREEDY])[0].finish_reason == "length"
        assert len(answers[-1].token_ids) > num_tokens or answers[-1].ended.is_set()
        assert not first.done()
        shut_down([clients[1].loop])
        first.result(60)
    assert [client.loop.error for client in clients] == [None, None]
    assert {answer.wait(0).finish_reason for answer in answers} <= {"abort", "length"}


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_dead_member_ends_the_others(clients, thread_group, is_idle):
    answers = []
    if not is_idle:
        long = dataclasses.replace(GREEDY, max_new_tokens=100)
        answers = clients[0].submit([[2, 3]] * 4, [long] * 4)
        answers[0].first.wait(60)
    thread_group.kill(1)
    for answer in answers:
        assert answer.wait().outputs[-1].error == "RuntimeError: member 1 is gone"
    for client in clients:
        client.loop._thread.join(60)
        assert client.loop.error == "RuntimeError: member 1 is gone"
        with pytest.raises(RuntimeError, match="has stopped"):
            client.submit([[2]], [GREEDY])
        with pytest.raises(RuntimeError, match="has stopped"):
            client.loop.flush_cache()


def test_an_abandoned_loop_dies_with_the_reason(clients, thread_group):
    clients[0].loop.abandon("the lights are out")
    clients[0].loop._thread.join(60)
    assert clients[0].loop.error == "RuntimeError: the lights are out"
    thread_group.kill(0)


def test_no_wake_up_is_lost(thread_group, new_client, shut_down):
    """Requests come to idle members, to either or to both at a time, thousands of times."""
    loops = [new_client(peers).loop for peers in thread_group.members]
    for loop in loops:
        loop.start()
    params = dataclasses.replace(GREEDY, max_new_tokens=1)

    def send(member: int, count: int) -> None:
        for index in range(count):
            ended = threading.Event()

            def sink(output: Output, ended: threading.Event = ended) -> None:
                ended.set()

            loops[member].submit([Request(f"{member}-{index}", [3], params, sink)])
            assert ended.wait(30), f"request {index} of member {member} was not served"

    for member in (0, 1):
        send(member, 500)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(send, member, 1000) for member in (0, 1)]:
            done.result()
    shut_down(loops)
    assert [loop.error for loop in loops] == [None, None]


def test_members_warm_up_together(engine, other_engine, thread_group, monkeypatch):
    """Each program is run by all members after all have come to it."""
    ran: list[tuple[int, int]] = []
    lock = threading.Lock()

    def programs(member: int):
        def run(index: int) -> int:
            with lock:
                ran.append((index, member))
            return 0

        for index in range(5):
            yield f"program {index}", lambda index=index: run(index)

    engines = (engine, other_engine)
    for member, of_member in enumerate(engines):
        monkeypatch.setattr(of_member, "_programs", lambda member=member: programs(member))
        monkeypatch.setattr(of_member, "_batches", lambda: iter(()))
    with ThreadPoolExecutor(2) as pool:
        done = [
            pool.submit(of_member.warmup, peers)
            for of_member, peers in zip(engines, thread_group.members, strict=True)
        ]
        for future in done:
            future.result(60)
    # A member may be one program ahead of the other's notes, never two.
    assert len(ran) == 10
    assert all(abs(index - position // 2) <= 1 for position, (index, _) in enumerate(ran))
