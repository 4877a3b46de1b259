"""`benchmarks/forward.py` on a small model: that it runs, checks and writes."""

import json

import pytest

from benchmarks import forward


@pytest.mark.slow
def test_dry_run(tmp_path, capsys):
    output = tmp_path / "result.json"
    sizes = ["--layers", "2", "--requests", "2", "--prompt", "70", "--batch", "3", "--repeats", "2"]
    assert forward.main(["--dry-run", *sizes, "--output", str(output), "--commit", "abc"]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == document
    assert document["commit"] == "abc"
    for phase, tokens in (("prefill", 140), ("decode", 3)):
        assert document[phase]["tokens"] == tokens
        assert document[phase]["ms"] > 0
        assert document[phase]["compilations_while_timing"] == 0
    assert document["difference"]["prefill_from_plain_jax"] < 0.01
    assert document["difference"]["decode_from_plain_jax"] < 0.01
    assert 0 < document["difference"]["decode_from_prefill"] < 0.3


def test_requests_share_no_slot():
    prompts = forward.prefill_batch(3, 70, 140)
    last = forward.decode_batch(3, 140)
    assert len(set(prompts.slots[0])) == 210
    assert not set(last.slots[0]) & set(prompts.slots[0])
    assert set(prompts.slots[0] // forward.PAGE_SIZE) == set(prompts.page_ids[0])
    assert set(last.slots[0] // forward.PAGE_SIZE) == set(last.page_table[0, :, -1])
