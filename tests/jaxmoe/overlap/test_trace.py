"""`jaxmoe trace` on a small model with a slow modelled link."""

import itertools
import json

import pytest

from serving.cli import main


RANKS, MOE_LAYERS = 2, 3  # of "v3-small"
SMALL = ["--random-config", "v3-small", "--ep-size", str(RANKS), "--tokens", "64"]
SLOW = ["--link-bandwidth", "2e7"]


def trace(tmp_path, capsys, *flags):
    """What it prints, and the events of its file by rank and row."""
    output = tmp_path / "trace.json"
    assert main(["trace", *SMALL, *flags, "--output", str(output)]) == 0
    events = json.loads(output.read_text(encoding="utf-8"))["traceEvents"]
    rows = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    return json.loads(capsys.readouterr().out), rows


def spans(events):
    return [(e["ts"], e["ts"] + e["dur"]) for e in events]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_in_sequence_nothing_is_hidden(tmp_path, capsys, phase):
    printed, rows = trace(tmp_path, capsys, *SLOW, "--phase", phase)
    assert printed["overlap"] == "none"
    assert printed["hidden_share"] == 0
    assert set(rows) == set(itertools.product(range(RANKS), (0, 1)))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_micro_batches_have_rows_of_their_own(tmp_path, capsys, phase):
    picture = tmp_path / "trace.svg"
    flags = ["--enable-two-batch-overlap", "--phase", phase, "--picture", str(picture)]
    printed, rows = trace(tmp_path, capsys, *SLOW, *flags)
    assert printed["overlap"] == "two_batch_in_turns"
    assert 0 < printed["hidden_share"] <= 1
    assert set(rows) == set(itertools.product(range(RANKS), range(4)))
    for (_, row), events in rows.items():
        for (_, stop), (start, _) in itertools.pairwise(spans(events)):
            assert stop <= start + 1e-3  # of a microsecond: they are rounded
        if row % 2:
            expected = ["dispatch", "combine"] * MOE_LAYERS
            assert [event["name"] for event in events] == expected
    assert "<svg" in picture.read_text(encoding="utf-8")


def test_the_shared_experts_hide_behind_a_dispatch(tmp_path, capsys):
    _, rows = trace(tmp_path, capsys, *SLOW, "--enable-single-batch-overlap")
    for rank in range(RANKS):
        dispatches = spans(e for e in rows[rank, 1] if e["name"] == "dispatch")
        shared = spans(e for e in rows[rank, 0] if e["name"] == "shared_experts")
        assert shared
        for start, stop in shared:
            assert any(begin <= start and stop <= end for begin, end in dispatches)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "0"], "--tokens must be positive, got 0"),
        (["--moe-a2a-backend", "reference", *SLOW], "only loopback has a modelled link"),
        (["--link-bandwidth", "-1"], "bandwidth must be positive, got -1"),
        (["--picture", "trace.foo"], "'foo' is not supported"),
        (["--moe-a2a-backend", "deepep"], "runs on 'gpu' devices"),
    ],
)
def test_refusals(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
