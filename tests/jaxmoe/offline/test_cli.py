import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxmoe.offline import cli


NUM_PROMPTS = 48
RUN = """
import argparse, sys, jax
jax.config.update("jax_num_cpu_devices", 2)
from jaxmoe.offline import cli
parser = argparse.ArgumentParser()
cli.add_arguments(parser)
sys.exit(cli.run(parser.parse_args()))
"""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Prompt {i} " * (i % 2 + 1), "id": f"p{i}"} for i in range(NUM_PROMPTS)]
    lines[5]["temperature"] = 0.9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def arguments(model_dir, prompts, tmp_path):
    return [
        *("--model-path", str(model_dir), "--input", str(prompts)),
        *("--output", str(tmp_path / "out.jsonl")),
        *("--ep-size", "2", "--batch-size", "2", "--max-new-tokens", "100", "--ignore-eos"),
    ]


def _run(arguments):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(arguments))


def _read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_killed_run_continues_where_it_stopped(arguments, tmp_path, capfd, monkeypatch):
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"

    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], env=environment, stderr=subprocess.PIPE
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not (partial.exists() and partial.read_bytes().count(b"\n") > 6):
                assert process.poll() is None, process.stderr.read().decode()
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            process.send_signal(signal.SIGKILL)
    assert not output.exists()
    num_done = partial.read_bytes().count(b"\n") - 1
    assert 6 <= num_done < NUM_PROMPTS

    monkeypatch.setattr(cli.OfflineEngine, "load", functools.cache(cli.OfflineEngine.load))
    capfd.readouterr()
    assert _run(arguments) == 0
    said = capfd.readouterr().err
    assert f"continuing: {num_done} of {NUM_PROMPTS} prompts are done" in said
    assert f"{NUM_PROMPTS - num_done} prompts, " in said
    assert not partial.exists()
    continued = output.read_bytes()

    # Uninterrupted, by the same engine to compile once.
    assert _run([*arguments, "--overwrite"]) == 0
    assert output.read_bytes() == continued
    results = _read(output)
    assert [result["id"] for result in results] == [f"p{i}" for i in range(NUM_PROMPTS)]
    assert all(result["completion_tokens"] == 100 for result in results)


def test_malformed_lines_are_reported_and_the_rest_is_done(arguments, prompts, tmp_path, capfd):
    prompts.write_text('{"prompt": "a"}\nnot JSON\n\n{"prompt": 1}\n{"prompt": "b", "id": 7}\n')
    assert _run(arguments) == 1
    results = _read(tmp_path / "out.jsonl")
    assert [result["index"] for result in results] == [0, 1, 3, 4]
    assert [set(result) for result in results[1:3]] == [{"index", "error"}] * 2
    assert results[3]["id"] == 7
    assert set(results[3]) == {
        *("index", "id", "text", "token_ids"),
        *("finish_reason", "prompt_tokens", "completion_tokens"),
    }
    said = capfd.readouterr().err
    assert "line 2: the line must be a JSON object" in said
    assert "line 4: prompt must be a string" in said
    assert "2 of 4 lines were not run" in said
    assert "tokens/s" in said and "compilations" in said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model-path", "nowhere"], "nowhere"),
        (["--temperature", "-1"], "temperature must be"),
        (["--ep-size", "9"], "ep_size must be between 1 and"),
        (["--batch-size", "0"], "batch_size must be positive"),
        (["--ep-num-redundant-experts", "-1"], "must be divisible by ep_size"),
        (["--output", "nowhere/out.jsonl"], "does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_an_error_in_words(arguments, tmp_path, capfd, changed, message):
    assert _run([*arguments, *changed]) == 2
    said = capfd.readouterr().err
    assert message in said and said.startswith("jaxmoe generate: error: ")
    assert not list(tmp_path.glob("out.jsonl*"))


def test_the_input_is_not_overwritten(arguments, prompts, capfd):
    before = prompts.read_bytes()
    assert _run([*arguments, "--output", str(prompts), "--overwrite"]) == 2
    assert "must not be the input" in capfd.readouterr().err
    assert prompts.read_bytes() == before
