"""The pool under a clock that only moves when told."""

import pytest
from pydantic import ValidationError

from serving.router.pool import (
    TYPICAL_PROMPT_TOKENS,
    Pool,
    Registration,
    Role,
    State,
    Timing,
    WorkerStatus,
    worker_url,
)


P, D = "http://p:1", "http://d:1"
TIMING = Timing(poll=5.0, poll_of_others=1.0, silence=10.0)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pool(clock):
    """One static worker of each role, asked once."""
    pool = Pool([P], [D], timing=TIMING, clock=clock)
    assert pool.due() == [P, D]
    pool.heard(P, status("prefill"), clock.now)
    pool.heard(D, status("decode"), clock.now)
    return pool


def status(mode="decode", **changed) -> WorkerStatus:
    values = {
        "mode": mode, "transfer_address": "p:8998" if mode == "prefill" else None, "model": "m",
        "page_size": 64, "num_running": 0, "num_waiting": 0, "draining": False,
    }  # fmt: skip
    return WorkerStatus(**(values | changed))


def registration(mode="decode", url="http://new:1", transfer_address=None) -> Registration:
    return Registration(mode=mode, url=url, transfer_address=transfer_address)


def state(pool, url) -> State | None:
    return next((worker.state for worker in pool.workers() if worker.url == url), None)


def only(pool, url):
    (worker,) = [worker for worker in pool.workers() if worker.url == url]
    return worker


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1", "http://a:1"),
        ("HTTP://Node-1.Example:30000/", "http://node-1.example:30000"),
        ("https://[::1]:080", "https://[::1]:80"),
    ],
)
def test_urls_have_one_form(text, expected):
    assert worker_url(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "a:1", "http://", "http://a", "http://:1", "http://a:0", "http://a:65536", "http://a:b",
     "http://a:1/v1", "http://a:1?x", "http://u@a:1", "http://a b:1", "ftp://a:1", "http://a:1\n"],
)  # fmt: skip
def test_other_urls_are_refused(text):
    with pytest.raises(ValueError, match="a worker's URL is http://HOST:PORT, got"):
        worker_url(text)


def test_a_url_may_be_given_once():
    with pytest.raises(ValueError, match="given twice"):
        Pool(["http://a:1"], ["http://A:1/"])


def test_static_workers_get_nothing_until_they_have_answered(clock):
    pool = Pool([P], [D], timing=TIMING, clock=clock)
    assert pool.missing() == [Role.PREFILL, Role.DECODE]
    pool.due()
    pool.heard(D, status(), clock.now)
    assert pool.missing() == [Role.PREFILL]
    pool.heard(P, status("prefill"), clock.now)
    assert pool.missing() == []
    assert pool.online(Role.PREFILL)[0].transfer_address == "p:8998"


@pytest.mark.parametrize("mode", ["prefill", "null"])
def test_a_worker_of_another_mode_is_never_used(pool, clock, mode, caplog):
    for _ in range(3):
        pool.heard(D, status(mode, transfer_address="d:1"), clock.now)
    assert pool.missing() == [Role.DECODE]
    assert only(pool, D).error == f"its mode is {mode}"
    assert len(caplog.records) == 1 and f"its mode is {mode}" in caplog.text
    pool.heard(D, status(), clock.now)
    assert pool.missing() == []


def test_two_failed_polls_in_a_row_take_a_worker_out_and_one_success_brings_it_back(pool, clock):
    pool.not_heard(D, "refused")
    assert state(pool, D) is State.ONLINE
    pool.heard(D, status(), clock.now)
    pool.not_heard(D, "refused")
    assert state(pool, D) is State.ONLINE
    pool.not_heard(D, "refused")
    assert state(pool, D) is State.OFFLINE and only(pool, D).error == "refused"
    pool.heard(D, status(), clock.now)
    assert state(pool, D) is State.ONLINE and only(pool, D).error is None


def test_polls_are_due_at_their_intervals_and_one_at_a_time(pool, clock):
    assert pool.due() == []
    clock.now += 4.9
    assert pool.due() == []
    clock.now += 0.1
    assert pool.due() == [P, D]
    clock.now += 50
    assert pool.due() == [], "they are still under way"
    pool.heard(P, status("prefill"), clock.now)
    pool.not_heard(D, "no answer")
    pool.not_heard(D, "no answer")
    clock.now += 1
    assert pool.due() == [D], "soon, since it is offline"


def test_a_suspect_is_asked_soon_and_back_when_it_answers(pool, clock):
    clock.now += 1
    pool.suspect(D, "ReadError")
    assert state(pool, D) is State.SUSPECT and only(pool, D).num_failures == 1
    assert pool.online(Role.DECODE) == []
    clock.now += 1
    assert pool.due() == [D]
    pool.heard(D, status(), asked_at=clock.now)
    assert state(pool, D) is State.ONLINE


def test_an_answer_to_an_earlier_question_clears_no_suspect(pool, clock):
    asked_at = clock.now
    clock.now += 1
    pool.suspect(D, "ReadError")
    pool.heard(D, status(), asked_at)
    assert state(pool, D) is State.SUSPECT


def test_draining_workers_get_no_new_requests(pool, clock):
    pool.heard(D, status(draining=True), clock.now)
    assert state(pool, D) is State.DRAINING and pool.missing() == [Role.DECODE]


def test_registered_workers_live_by_their_beats(pool, clock):
    new = registration()
    assert not pool.beat(new), "it must be asked first"
    pool.register(new, status())
    assert [worker.url for worker in pool.online(Role.DECODE)] == [D, new.url]
    for _ in range(5):
        clock.now += 9
        assert pool.beat(new)
    clock.now += 10
    assert state(pool, new.url) is State.ONLINE
    clock.now += 0.1
    assert state(pool, new.url) is None and not pool.beat(new)
    assert state(pool, D) is State.ONLINE, "static workers need no beats"


def test_a_beat_clears_a_suspect_but_not_what_polls_found(pool):
    new = registration()
    pool.register(new, status())
    pool.suspect(new.url, "ReadError")
    assert pool.beat(new) and state(pool, new.url) is State.ONLINE
    pool.not_heard(new.url, "no answer")
    pool.not_heard(new.url, "no answer")
    assert not pool.beat(new) and state(pool, new.url) is State.OFFLINE
    pool.register(new, status())
    assert state(pool, new.url) is State.ONLINE


def test_a_restarted_worker_is_asked_again(pool):
    old = registration("prefill", transfer_address="new:1")
    pool.register(old, status("prefill", transfer_address="new:1"))
    again = registration("prefill", transfer_address="new:2")
    assert not pool.beat(again)
    pool.register(again, status("prefill", transfer_address="new:2"))
    assert only(pool, again.url).transfer_address == "new:2"
    assert not pool.beat(registration())
    pool.register(registration(), status())
    assert only(pool, again.url).role is Role.DECODE


def test_registrations_must_be_true(pool):
    with pytest.raises(ValueError, match="registers as decode, but its mode is null"):
        pool.register(registration(), status("null"))
    with pytest.raises(ValueError, match="transfer address new:2, but says it is new:1"):
        pool.register(
            registration("prefill", transfer_address="new:2"),
            status("prefill", transfer_address="new:1"),
        )
    with pytest.raises(ValueError, match="registers as decode, but is here for prefill"):
        pool.register(registration(url=P), status())
    assert state(pool, "http://new:1") is None


def test_deregistering(pool, clock):
    new = registration()
    pool.register(new, status())
    with pool.holding(new.url, 7):
        pool.deregister(new.url)
        assert state(pool, new.url) is None
    pool.deregister(new.url)
    pool.deregister(D)
    assert state(pool, D) is State.OFFLINE, "static workers are awaited back"
    clock.now += 1
    pool.heard(D, status(), asked_at=clock.now)
    assert state(pool, D) is State.ONLINE


def test_news_of_a_worker_that_is_gone_changes_nothing(pool, clock):
    pool.heard("http://gone:1", status(), clock.now)
    pool.not_heard("http://gone:1", "no answer")
    pool.suspect("http://gone:1", "ReadError")
    pool.deregister("http://gone:1")
    with pool.holding("http://gone:1", 5):
        pass
    assert len(pool.workers()) == 2


def test_load_is_what_is_under_way_here_and_of_others(pool, clock):
    with pool.holding(P, 100), pool.holding(P, 10), pool.holding(D, 100):
        assert (only(pool, P).load, only(pool, D).load) == (110, 1)
        pool.heard(P, status("prefill", num_running=3, num_waiting=1), clock.now)
        pool.heard(D, status(num_running=3), clock.now)
        assert only(pool, P).load == 110 + 2 * TYPICAL_PROMPT_TOKENS
        assert only(pool, D).load == 3
    assert only(pool, D).load == 2
    pool.heard(D, status(), clock.now)
    assert only(pool, D).load == 0
    with pytest.raises(KeyError), pool.holding(D, 5):
        raise KeyError
    assert only(pool, D).num_requests == only(pool, D).num_tokens == 0


@pytest.mark.parametrize("address", ["a", "a:b", "a:1\r\nX-Evil: 1", "http://a:1", ""])
def test_transfer_addresses_are_host_and_port(address):
    with pytest.raises(ValidationError, match="a transfer address is HOST:PORT"):
        registration("prefill", transfer_address=address)


def test_a_prefill_worker_has_a_transfer_address():
    with pytest.raises(ValidationError, match="must have a transfer address"):
        status("prefill", transfer_address=None)
