"""`jaxmoe router` as a user meets it."""

import signal
import subprocess
import sys
import time

import httpx
import pytest

from serving.cli import main
from tests.processes import ROOT, Process


def test_it_runs_until_a_signal_without_any_worker():
    with Process("serving.cli", "router", "--port", "0") as process:
        started = time.monotonic()
        url = process.read_until(r"Ready: (\S+)", timeout=30)[1]
        # 0.5 s on an idle machine; the bound is for busy ones.
        assert time.monotonic() - started < 10
        assert httpx.get(f"{url}/servers").json() == {"servers": []}
        assert httpx.get(f"{url}/health").status_code == 503
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(20) == 0


def test_it_imports_no_jax():
    script = (
        "import sys, serving.router.cli\n"
        "found = {'jax', 'jaxlib', 'numpy', 'flax'} & set(sys.modules)\n"
        "assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prefill", "a:1"], "a worker's URL is http://HOST:PORT, got 'a:1'"),
        (["--decode", "http://b:2", "http://b"], "a worker's URL is http://HOST:PORT"),
        (["--prefill", "http://a:1", "--decode", "http://A:1/"], "a worker is given twice"),
        (["--decode", "http://b:2", "--decode", "http://b:2"], "a worker is given twice"),
        (["--max-retries", "-1"], "--max-retries must not be negative, got -1"),
        (["--request-timeout", "0"], "--request-timeout must be above 0, got 0"),
        (["--request-timeout", "nan"], "--request-timeout must be above 0, got nan"),
        (["--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    assert main(["router", "--port", "0", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1


def test_unknown_policies_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["router", "--policy", "random"])
    assert refused.value.code == 2
    assert "round_robin" in capsys.readouterr().err
