"""`benchmarks/pd.py` and `benchmarks/pd_soak.py`, short: they run, check, and their figures belong
together."""

import json

import pytest

from benchmarks import pd, pd_soak
from serving.kv_transfer.backends import BACKENDS


pytestmark = pytest.mark.slow


def test_latency_and_transfer(tmp_path, capsys):
    output = tmp_path / "pd.json"
    assert pd.main(["--quick", "--rounds", "1", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    latency = document["latency"]
    assert latency["num_answers"] == 4 and latency["num_different"] == 0
    for name, sent in (("unified", set()), ("apart", {"transfer", "first_decode"})):
        found = latency[name]
        assert set(found["part_ms"]) == {"queue", "prefill"} | sent
        for key in ("inter_token_ms", "first_token_ms_of_long", "first_token_ms_of_short"):
            times = found[key]
            assert 0 < times["median"] <= times["p99"] <= times["max"]
        assert found["tokens_per_s"] > 0
    rates = document["transfer"]["gb_per_s"]
    assert {"copy", "socket", "socket, checksums"} <= set(rates)
    assert {name.partition(",")[0] for name in rates} <= {"copy", *BACKENDS}
    assert all(0 < rate["median"] <= rate["max"] < 1000 for rate in rates.values())
    printed = capsys.readouterr().out
    assert "0 of 4 answers differ" in printed


def test_soak(capsys):
    status = pd_soak.main(["--minutes", "0.2"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    found = json.loads(printed.splitlines()[-1])
    assert found["violations"] == 0
    assert found["outcomes"]["right"] > 0 and sum(found["faults"].values()) > 0
    assert found["longest_seconds"] < pd_soak.BOUND_SECONDS
    assert set(found["growth_mb"]) == {"prefill 0", "prefill 1", "decode 0", "decode 1"}
