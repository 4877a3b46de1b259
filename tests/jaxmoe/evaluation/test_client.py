"""The command against a server."""

import json
import socket

import pytest

from jaxmoe.evaluation import ServerError, client, evaluate
from jaxmoe.tasks import EVALUATION_SETS, evaluation_set


QUESTIONS = [item.question for item in evaluation_set("new_seeds")[:12]]
LIMIT = ("--set", "new_seeds", "--limit", "12")


def failure(status, message, **headers):
    return status, headers, {"error": {"message": message}}


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_right_answers_are_scored_so(run, server, suffix):
    status, out, _ = run(
        *("--base-url", server.url + suffix, *LIMIT, "--json"),
        *("--max-new-tokens", "99", "--batch-size", "3"),
    )
    found = json.loads(out)
    assert status == 0
    assert found["sets"]["new_seeds"]["accuracy"] == 1.0
    assert found["generated_tokens"] == 12 * 7
    assert found["settings"]["model"] == "the-model"
    assert found["settings"]["base_url"] == server.url
    assert 1 <= server.most_at_once <= 3
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == sorted(QUESTIONS)
    for body in server.bodies:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("the-model", 0, 99)
        assert [message["role"] for message in body["messages"]] == ["user"]


def test_all_sets_are_asked_by_default(run, server):
    status, out, _ = run("--base-url", server.url, "--limit", "3")
    assert status == 0
    for name in EVALUATION_SETS:
        assert f"\n{name} " in out
    assert len(server.bodies) == 9


def test_a_full_server_is_waited_for_and_a_dropped_connection_tried_again(run, server, monkeypatch):
    monkeypatch.setattr(client, "RECONNECT_SECONDS", 0.0)
    full = failure(503, "too many requests wait", **{"Retry-After": "0"})
    server.replies = {QUESTIONS[0]: 5 * [full], QUESTIONS[1]: [None, None], QUESTIONS[2]: [full]}
    status, out, _ = run("--base-url", server.url, *LIMIT, "--json")
    assert status == 0
    assert json.loads(out)["sets"]["new_seeds"]["num_correct"] == 12
    assert len(server.bodies) == 12 + 5 + 2 + 1


def test_a_failed_item_is_reported_and_not_scored(run, server, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "RECONNECT_SECONDS", 0.0)
    server.replies = {
        QUESTIONS[0]: [failure(500, "it broke")],
        QUESTIONS[1]: [(200, {}, {"choices": []})],
        QUESTIONS[2]: 3 * [None],
    }
    output = tmp_path / "out.json"
    status, out, err = run("--base-url", server.url, *LIMIT, "--json", "--output", output)
    found = json.loads(out)
    assert status == 1
    assert (found["num_failed"], found["sets"]["new_seeds"]["num_items"]) == (3, 9)
    assert found["sets"]["new_seeds"]["accuracy"] == 1.0
    assert "new_seeds/0: /v1/chat/completions: 500 it broke" in err
    assert "new_seeds/1: not a chat completion" in err
    assert "3 items got no answer" in err
    first = json.loads(output.read_text())["items"][0]
    assert first["correct"] is None and "it broke" in first["error"]
    with pytest.raises(ValueError, match="has no answer to new_seeds/0"):
        run("--base-url", server.url, *LIMIT, "--baseline", output)


def test_a_server_that_only_fails_is_given_up(run, server):
    server.replies = {question: [failure(500, "it broke")] for question in QUESTIONS}
    status, _, err = run("--base-url", server.url, *LIMIT, "--batch-size", "1")
    assert status == 1
    assert len(server.bodies) == client.MAX_FAILURES_IN_A_ROW
    assert "12 items got no answer" in err


def test_no_comparison_when_items_failed(run, server, tmp_path):
    output = tmp_path / "out.json"
    assert run("--base-url", server.url, *LIMIT, "--output", output)[0] == 0
    server.replies = {QUESTIONS[0]: [failure(500, "it broke")]}
    _, out, _ = run("--base-url", server.url, *LIMIT, "--baseline", output, "--json")
    assert "baseline" not in json.loads(out)["sets"]["new_seeds"]


def test_a_server_that_is_not_there_is_an_error(run):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match="ConnectionRefusedError"):
            run("--base-url", url)


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://localhost", "http://"])
def test_the_base_url_is_checked(run, url):
    with pytest.raises(ValueError, match=r"the base URL must be http\(s\)://"):
        run("--base-url", url)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model_path", "somewhere"),
        ("backend", "torch"),
        ("dtype", "float32"),
        ("ep_size", 2),
        ("num_redundant_experts", 8),
        ("deepep_mode", "normal"),
        ("expert_load", True),
    ],
)
def test_what_the_server_decides_cannot_be_chosen(setting, value):
    with pytest.raises(ValueError, match=f"{setting} cannot be chosen for a running server"):
        evaluate(base_url="http://localhost", **{setting: value})


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("0", 0.0), ("-1", 0.0), ("1000", 30.0), (None, 1.0), ("Wed, 21 Oct", 1.0)],
)
def test_retry_after(header, seconds):
    assert client._retry_seconds(header) == seconds
