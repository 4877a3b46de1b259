"""Model paths: Hugging Face directories, Orbax checkpoints made from them, random models."""

from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxmoe.checkpoint.hf import load_hf
from jaxmoe.checkpoint.store import convert, is_orbax, load_orbax
from jaxmoe.checkpoint.synthetic import RANDOM_CONFIGS, write_random_checkpoint
from jaxmoe.checkpoint.tensor_file import INDEX_FILE, SINGLE_FILE, CheckpointError, has_tensors
from jaxmoe.plan import Quantization
from jaxmoe.sharding import EpRanks
from jaxmoe.step import ShardedModel


__all__ = [
    "RANDOM_CONFIGS",
    "CheckpointError",
    "convert",
    "load_hf",
    "load_model",
    "load_orbax",
    "write_random_checkpoint",
]


def load_model(
    model_dir: Path | str,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    num_slots: int | None = None,
    slots: np.ndarray | None = None,
    ranks: EpRanks | None = None,
) -> ShardedModel:
    """The model in this directory, whichever kind it is; see `load_hf` and `load_orbax`."""
    model_dir = Path(model_dir)
    load = load_orbax if is_orbax(model_dir) else load_hf if has_tensors(model_dir) else None
    if load is not None:
        return load(
            model_dir,
            mesh,
            dtype=dtype,
            quantization=quantization,
            num_slots=num_slots,
            slots=slots,
            ranks=ranks,
        )
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a directory")
    raise CheckpointError(
        f"{model_dir} is not a model path: expected {SINGLE_FILE}, {INDEX_FILE} or a directory "
        "made by `jaxmoe convert`"
    )
