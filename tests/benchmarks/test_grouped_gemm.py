"""`benchmarks/grouped_gemm.py` on tiny shapes: that it runs and writes, not what it measures."""

import json

import jax
import numpy as np
import pytest

from benchmarks import grouped_gemm


def test_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # it sets this itself
    output = tmp_path / "result.json"
    arguments = ["--dry-run", "--quick", "--output", str(output), "--commit", "abc"]
    assert grouped_gemm.main([*arguments, "--implementations", "reference"]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert document["commit"] == "abc"
    rows = document["results"]
    assert [row["case"] for row in rows] == [
        case.label for case in grouped_gemm.make_cases() if case.label in grouped_gemm.QUICK
    ]
    assert len(rows) == len(grouped_gemm.QUICK)
    for row in rows:
        assert row["relative_error"] < 2e-3
        assert {"us", "tflops", "gb_per_s", "of_bound"} <= set(row)
    printed = capsys.readouterr().out
    assert all(label in printed for label in grouped_gemm.QUICK)


def test_needs_a_gpu():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a GPU"):
        grouped_gemm.main(["--quick"])


@pytest.mark.parametrize("case", grouped_gemm.make_cases(), ids=lambda case: case.label)
def test_cases_fit_their_room(case):
    rows = np.concatenate(case.owned)
    room = case.rows * (case.num_groups if case.layout == "masked" else 1)
    assert len(set(rows)) == len(rows) == case.num_owned
    assert rows.max() < room
    if case.layout == "contiguous":
        groups = grouped_gemm.row_layout(case)
        ends = grouped_gemm.psum_layout(case)
        for group, owned in enumerate(case.owned):
            assert set(groups[owned.astype(int)]) <= {group}
            assert not len(owned) or ends[group] == owned[-1] + 1


def test_labels_are_unique():
    labels = [case.label for case in grouped_gemm.make_cases()]
    assert len(set(labels)) == len(labels)
    assert set(grouped_gemm.QUICK) <= set(labels)
