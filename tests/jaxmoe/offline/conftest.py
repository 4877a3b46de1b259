"""One small random model with a byte tokenizer, for all tests of offline inference."""

import shutil
from pathlib import Path

import pytest

from jaxmoe.checkpoint import RANDOM_CONFIGS, write_random_checkpoint


BYTES = Path(__file__).parents[2] / "byte_tokenizer"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    target = tmp_path_factory.mktemp("offline") / "model"
    config = {
        **RANDOM_CONFIGS["tiny"],
        "vocab_size": 320,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "max_position_embeddings": 256,
    }
    write_random_checkpoint(target, config, seed=0, dtype="float32")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BYTES / name, target / name)
    return target
