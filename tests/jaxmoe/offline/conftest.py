"""One small random model with the embedded tokenizer, for all tests of offline inference."""

import json
import shutil
from pathlib import Path

import pytest

import jaxmoe.assets
from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint


ASSETS = Path(jaxmoe.assets.__file__).parent


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    target = tmp_path_factory.mktemp("offline") / "model"
    vocab_size = json.loads((ASSETS / "config.json").read_text())["vocab_size"]
    config = {
        **RANDOM_CONFIGS["tiny"],
        "vocab_size": vocab_size,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "max_position_embeddings": 256,
    }
    write_random_checkpoint(target, config, seed=0, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / name, target / name)
    return target
