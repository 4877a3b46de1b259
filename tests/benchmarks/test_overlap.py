"""`benchmarks/overlap.py` on a small model: that it runs, measures and writes."""

import json

import pytest

from benchmarks import overlap


@pytest.mark.slow
def test_dry_run(tmp_path, capsys):
    output = tmp_path / "result.json"
    sizes = ["--ep-size", "2", "--prefill-tokens", "64", "--decode-rows", "8", "--repeats", "2"]
    assert overlap.main(["--dry-run", *sizes, "--output", str(output), "--commit", "abc"]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == document
    assert document["commit"] == "abc"
    for phase, tokens in (("prefill", 64), ("decode", 8)):
        measured = document[phase]
        assert measured["tokens_per_rank"] == tokens
        times = [measured[f"{name}_ms"] for name in ("serial", "overlapped", "computation")]
        bound = min(times[2], measured["communication_ms"])
        assert min(*times, bound) > 0
        assert measured["serial_hidden_share"] == 0
        assert measured["overlapped_hidden_share"] == pytest.approx(
            (times[0] - times[1]) / bound, abs=0.05
        )
    prefill = document["prefill"]
    assert prefill["overlapped_temporary_bytes"] < 0.75 * prefill["serial_temporary_bytes"]
