"""Training parameters as a Hugging Face directory, and back.

Names are DeepSeek-V3's: three matrices for each expert, the MTP layer as layer `num_hidden_layers`
with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`. DeepSeek's files repeat embedding and head
there; ours leave out these copies of shared weights.

    python -m examples.train_tiny.export --run DIR --output DIR [--tokenizer DIR]
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from examples.train_tiny import model
from jaxmoe.checkpoint.parameters import EXPERT_MATRICES
from jaxmoe.checkpoint.tensor_file import INDEX_FILE, CheckpointError, find_tensors
from jaxmoe.config import ModelConfig
from jaxmoe.tokenizer import Tokenizer


MAX_SHARD_BYTES = 15 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def export(
    target_dir: Path | str,
    params: Mapping[str, jax.Array],
    correction_bias: jax.Array,
    config_json: Mapping[str, Any],
    *,
    tokenizer_dir: Path | str | None = None,
    dtype: str = "bfloat16",
    with_mtp: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Mapping[str, str] | None = None,
) -> Path:
    """Write the directory; returns it. It is complete or absent: written beside, then renamed.

    With `tokenizer_dir`, its files are copied and its special tokens put into the configuration.
    Correction biases stay float32, as DeepSeek publishes them: a step of 0.001 is less than what
    bfloat16 resolves of them.

    Raises ValueError when the target exists and is not empty.
    """
    target_dir = Path(target_dir)
    if target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir())):
        raise ValueError(f"{target_dir} exists and is not empty: exporting never overwrites")
    config = ModelConfig.from_hf(config_json)
    raw = {**config_json, "torch_dtype": dtype}
    with_mtp = with_mtp and model.has_mtp(params)
    raw["num_nextn_predict_layers"] = int(with_mtp)
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target_dir.name}-", suffix=".partial", dir=target_dir.parent
    ) as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        mtp = model.layer_prefix(config.num_hidden_layers)
        tensors = {
            name: value if name.endswith(model.CORRECTION_BIAS) else value.astype(DTYPES[dtype])
            for name, value in hf_tensors(params, correction_bias, config)
            if with_mtp or not name.startswith(mtp)
        }
        _write_tensors(staged, tensors, max_shard_bytes)
        if tokenizer_dir is not None:
            raw |= _copy_tokenizer(Path(tokenizer_dir), staged)
        for name, text in {"config.json": json.dumps(raw, indent=2), **(extra_files or {})}.items():
            (staged / name).write_text(text + "\n", encoding="utf-8")
        os.rename(staged, target_dir)
    return target_dir


def hf_tensors(
    params: Mapping[str, jax.Array], correction_bias: jax.Array, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 value of every tensor of the checkpoint."""
    for name in model.parameter_shapes(config, has_mtp=model.has_mtp(params)):
        value = np.asarray(params[name])
        prefix, kind = name.rsplit(".", 1)
        if kind not in EXPERT_MATRICES:
            yield name, value
            continue
        matrices = EXPERT_MATRICES[kind]
        for expert, stacked in enumerate(value):
            for matrix, part in zip(matrices, np.split(stacked, len(matrices)), strict=True):
                yield f"{prefix}.{expert}.{matrix}.weight", np.ascontiguousarray(part)
    for router, value in enumerate(np.asarray(correction_bias)):
        yield _bias_name(config, router), value


def load_export(model_dir: Path | str) -> tuple[model.Parameters, jax.Array]:
    """Float32 parameters and correction biases of a directory `export` wrote."""
    model_dir = Path(model_dir)
    config = ModelConfig.load(model_dir)
    stored = find_tensors(model_dir)

    def read(name: str) -> np.ndarray:
        if name not in stored:
            raise CheckpointError(f"tensor {name!r} is missing from {model_dir}")
        return stored[name].read().astype(np.float32)

    has_mtp = model.has_mtp(stored)  # type: ignore[arg-type]
    params = {}
    for name, shape in model.parameter_shapes(config, has_mtp=has_mtp).items():
        prefix, kind = name.rsplit(".", 1)
        if kind in EXPERT_MATRICES:
            value = np.stack(
                [
                    np.concatenate(
                        [read(f"{prefix}.{e}.{matrix}.weight") for matrix in EXPERT_MATRICES[kind]]
                    )
                    for e in range(shape[0])
                ]
            )
        else:
            value = read(name)
        if value.shape != shape:
            raise CheckpointError(
                f"tensor {name!r} in {model_dir}: expected shape {shape}, found {value.shape}"
            )
        params[name] = jnp.asarray(value)
    routers = range(model.num_routers(config, has_mtp=has_mtp))
    return params, jnp.asarray(np.stack([read(_bias_name(config, router)) for router in routers]))


def _bias_name(config: ModelConfig, router: int) -> str:
    layer = config.first_k_dense_replace + router
    return f"{model.layer_prefix(layer)}mlp.gate.{model.CORRECTION_BIAS}"


def _write_tensors(folder: Path, tensors: Mapping[str, np.ndarray], max_bytes: int) -> None:
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size and size + value.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    weight_map = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)  # safetensors makes it private
        weight_map.update(dict.fromkeys(shard, file_name))
    total_size = sum(value.nbytes for value in tensors.values())
    index_json = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index_json, indent=1), encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> dict[str, int]:
    """Copies the files; the token ids they give the configuration."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, target / name)
    tokenizer = Tokenizer.load(target)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def main(argv: list[str] | None = None) -> None:
    from examples.train_tiny import train  # which imports this module

    parser = argparse.ArgumentParser(description="Export a training run's last checkpoint.")
    parser.add_argument("--run", required=True, metavar="DIR", help="`--out` of the training")
    parser.add_argument("--output", required=True, metavar="DIR")
    parser.add_argument("--tokenizer", metavar="DIR", help="copy the tokenizer of this folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP layer out")
    args = parser.parse_args(argv)
    state, config_json = train.load_run(args.run)
    target = export(
        args.output,
        state.params,
        state.correction_bias,
        config_json,
        tokenizer_dir=args.tokenizer,
        dtype=args.dtype,
        with_mtp=not args.no_mtp,
    )
    print(target)


if __name__ == "__main__":
    main()
