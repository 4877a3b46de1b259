import logging
import subprocess
import sys

import pytest

from custom_calls.select import Implementation, select


def _fast():
    return "fast"


def _plain():
    return "plain"


def test_none_takes_the_first_that_can_run():
    table = {
        "gpu": Implementation(lambda: "gpu", "cuda"),
        "fast": Implementation(_fast, "cpu"),
        "plain": Implementation(_plain),
    }
    assert select("op", table, None) is _fast


def test_fallback_is_logged_once(caplog):
    table = {
        "fast": Implementation(_fast, "cpu", lambda: "not built for this test"),
        "plain": Implementation(_plain),
    }
    with caplog.at_level(logging.WARNING):
        assert select("op_logged_once", table, None) is _plain
        assert select("op_logged_once", table, None) is _plain
    assert len(caplog.records) == 1
    assert "'fast': not built for this test" in caplog.text


def test_other_platforms_are_passed_over_in_silence(caplog):
    table = {"gpu": Implementation(_fast, "cuda"), "plain": Implementation(_plain)}
    with caplog.at_level(logging.WARNING):
        assert select("op", table, None) is _plain
    assert not caplog.records


def test_a_name_runs_or_raises():
    table = {
        "gpu": Implementation(_fast, "cuda"),
        "fast": Implementation(_fast, "cpu", lambda: "not built"),
        "plain": Implementation(_plain),
    }
    assert select("op", table, "plain") is _plain
    with pytest.raises(ValueError, match=r"op .*'quick'.*\['gpu', 'fast', 'plain'\]"):
        select("op", table, "quick")
    with pytest.raises(RuntimeError, match=r"'fast' of .*'plain'\] cannot run: not built"):
        select("op", table, "fast")
    with pytest.raises(RuntimeError, match=r"'gpu' of .* cannot run: it needs 'cuda', not 'cpu'"):
        select("op", table, "gpu")


def test_nothing_can_run():
    with pytest.raises(RuntimeError, match="none of"):
        select("op", {"gpu": Implementation(_fast, "cuda")}, None)


def test_import_touches_no_device():
    code = """
import custom_calls.grouped_gemm, custom_calls.permute
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
