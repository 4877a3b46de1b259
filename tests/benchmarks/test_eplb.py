"""The parts of `benchmarks/eplb.py` on few items: they run, and their figures belong together."""

import json

import pytest

from benchmarks import eplb


SMALL = ("--ep-size", "4", "--redundant", "4", "--commit", "0", "--requests", "8")


@pytest.fixture
def run(tmp_path, capsys):
    def run(*arguments: str) -> dict:
        output = tmp_path / "eplb.json"
        assert eplb.main([*SMALL, *arguments, "--output", str(output)]) == 0
        document = json.loads(output.read_text())
        assert json.loads(capsys.readouterr().out) == document
        return document

    return run


def test_ranks(run):
    found = run("--parts", "ranks", "--items", "16", "--tokens", "64", "--repeats", "1")["ranks"]
    assert set(found) == {"stories", "uniform"}
    for times in found.values():
        assert times["balancedness_before"] < times["balancedness_after"] <= 1
        assert times["moved_slots"] > 0
        for name in ("before", "after"):
            assert 0 < times[f"slowest_rank_ms_{name}"] < times[f"all_ranks_ms_{name}"]


def test_counting(run):
    found = run("--parts", "counting", "--repeats", "1")["counting"]
    assert found["prefill"]["tokens_per_rank"] == 256
    assert found["decode"]["tokens_per_rank"] == 2
    assert all(times["plain_ms"] > 0 and times["counting_ms"] > 0 for times in found.values())


def test_serving(run):
    found = run("--parts", "serving", "--iterations", "20", "--windows", "3")["serving"]
    for domain in ("problems", "stories"):
        assert len(found[domain]["balancedness"]) == 3
        assert 0 < found[domain]["median_interval_ms"] <= found[domain]["longest_interval_ms"]
    assert found["rebalances"] + found["skipped"] + found["abandoned"] >= 4
    assert found["abandoned"] == 0
    assert found["compilations"] == 0
