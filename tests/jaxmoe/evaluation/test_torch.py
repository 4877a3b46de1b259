"""transformers' answers are ours."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmoe.evaluation import cli, evaluate
from jaxmoe.reference.torch_deepseek import ReferenceUnavailableError


@pytest.fixture
def model_with_mtp_layer(model_dir, tmp_path):
    """Its tensors are in the file, and transformers cannot use them."""
    target = tmp_path / "model"
    shutil.copytree(model_dir, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    (file,) = target.glob("*.safetensors")
    extra = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    save_file(load_file(file) | {extra: np.ones((64, 128), np.float32)}, file, {"format": "pt"})
    return target


@pytest.mark.torch
@pytest.mark.usefixtures("shared_engines")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_both_backends_give_the_same_texts(model_dir, model_with_mtp_layer, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    options = dict(limit=4, max_new_tokens=24, sets=("new_seeds",))
    ours = evaluate(str(model_dir), ep_size=2, batch_size=4, **options)
    ours.write(tmp_path / "ours.json")
    theirs = evaluate(
        model_with_mtp_layer,
        backend="torch",
        batch_size=3,  # padded batches, the last one short
        baseline=tmp_path / "ours.json",
        **options,
    )
    ours_in_set, theirs_in_set = (report.sets["new_seeds"] for report in (ours, theirs))
    assert [result.text for result in theirs_in_set.results] == [
        result.text for result in ours_in_set.results
    ]
    assert theirs_in_set.comparison.same_text == 1.0
    assert theirs.generated_tokens == ours.generated_tokens
    assert theirs.settings.backend == "torch"


def test_without_torch_the_command_says_what_to_install(run, monkeypatch):
    def unavailable(*args, **options):
        raise ReferenceUnavailableError("pip install 'jaxmoe[test]'")

    monkeypatch.setattr(cli, "evaluate", unavailable)
    status, _, err = run("--backend", "torch")
    assert status == 2
    assert "pip install 'jaxmoe[test]'" in err
