"""The command with the offline engine."""

import json

import pytest

from jaxmoe.tasks import DOMAINS


SCORE = {"accuracy", "interval", "num_items", "num_correct"}


@pytest.mark.usefixtures("shared_engines")
def test_the_embedded_model(run, tmp_path):
    output = tmp_path / "out.json"
    arguments = ("--set", "new_seeds", "--limit", "4", "--max-new-tokens", "8", "--ep-size", "1")
    status, out, err = run(*arguments, "--batch-size", "4", "--json", "--output", output)
    assert status == 0
    assert "4/4" in err and "new_seeds" in err
    found = json.loads(out)
    assert set(found) == {
        *("settings", "sets", "num_failed"),
        *("generated_tokens", "seconds", "tokens_per_second"),
    }
    assert found["settings"]["model"] == "embedded"
    assert (found["settings"]["backend"], found["settings"]["ep_size"]) == ("jax", 1)
    in_set = found["sets"]["new_seeds"]
    assert set(in_set) == {*SCORE, "num_failed", "seconds", "domains"}
    assert in_set["num_items"] == 4
    assert set(in_set["domains"]) <= set(DOMAINS)
    assert all(set(domain) == SCORE for domain in in_set["domains"].values())
    written = json.loads(output.read_text())
    assert {key: written[key] for key in found} == found
    assert [item["id"] for item in written["items"]] == [f"new_seeds/{i}" for i in range(4)]


@pytest.mark.usefixtures("shared_engines")
def test_fp8_is_compared_with_a_baseline(run, tmp_path):
    plain, output = tmp_path / "plain.json", tmp_path / "fp8.json"
    arguments = ("--set", "new_seeds", "--limit", "4", "--max-new-tokens", "8")
    arguments += ("--ep-size", "1", "--batch-size", "4")
    assert run(*arguments, "--output", plain)[0] == 0
    fp8 = ("--quantization", "fp8", "--baseline", plain, "--output", output)
    status, out, _ = run(*arguments, *fp8)
    assert status == 0
    assert "jax, embedded, fp8, float32" in out and "against baseline" in out
    settings = [json.loads(path.read_text())["settings"] for path in (plain, output)]
    assert [found["quantization"] for found in settings] == [None, "fp8"]


@pytest.mark.usefixtures("shared_engines")
def test_a_baseline_is_compared_with_item_by_item(run, model_dir, tmp_path):
    output = tmp_path / "out.json"
    model = ("--model-path", model_dir, "--ep-size", "2", "--batch-size", "4")
    items = ("--set", "new_seeds", "--limit", "4", "--max-new-tokens", "24")
    assert run(*model, *items, "--output", output)[0] == 0
    _, out, _ = run(*model, *items, "--baseline", output, "--json")
    assert json.loads(out)["sets"]["new_seeds"]["baseline"] == {
        **{"b": 0, "c": 0, "p_value": 1.0},
        **{"agreement": 1.0, "same_text": 1.0},
    }
    with pytest.raises(ValueError, match="other items of new_seeds: 1 of 5 are missing"):
        run(*model, "--set", "new_seeds", "--limit", "5", "--baseline", output)
    with pytest.raises(ValueError, match="other items of heldout_numbers: 4 of 4 are missing"):
        run(*model, "--limit", "4", "--baseline", output)
    with pytest.raises(ValueError, match="the output must not be the baseline"):
        run(*model, "--baseline", output, "--output", output)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--limit", "0"), ValueError, "limit must be positive"),
        (("--model-path", "nowhere"), OSError, "nowhere"),
        (("--baseline", "nowhere.json"), OSError, "nowhere.json"),
        (("--output", "nowhere/out.json"), ValueError, "does not exist"),
        (("--ep-size", "9"), ValueError, "ep_size must be between 1 and"),
        (("--batch-size", "0"), ValueError, "batch_size must be positive"),
        (("--max-new-tokens", "0"), ValueError, "max_new_tokens must be"),
        (("--max-new-tokens", "1024"), ValueError, "must not exceed the model's 1024 positions"),
        (("--backend", "torch", "--ep-size", "2"), ValueError, "ep_size cannot be chosen for"),
        (("--backend", "torch", "--quantization", "fp8"), ValueError, "quantization cannot be"),
        (("--quantization", "fp8"), ValueError, "moe_intermediate_size must be a multiple of 128"),
    ],
)
def test_a_wrong_argument_is_an_error_in_words(run, model_dir, arguments, error, message):
    model = () if "--model-path" in arguments else ("--model-path", model_dir)
    with pytest.raises(error, match=message):
        run(*model, *arguments)
