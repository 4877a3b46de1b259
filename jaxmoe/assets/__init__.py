"""The embedded model: what is served when no model is named.

Its weights are random (seeded), so its answers are noise; its architecture, tokenizer and chat
template are real.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxmoe.checkpoint.synthetic import write_random_checkpoint


EMBEDDED_MODEL_NAME = "jaxmoe-embedded"
SEED = 0


@contextlib.contextmanager
def embedded_model() -> Iterator[Path]:
    """A complete Hugging Face directory of the embedded model, for as long as the context lasts."""
    source = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="jaxmoe-") as directory:
        target = Path(directory) / EMBEDDED_MODEL_NAME
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        write_random_checkpoint(target, config, seed=SEED, dtype=config["torch_dtype"])
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, target / name)
        yield target
