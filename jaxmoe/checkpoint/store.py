"""Orbax checkpoints: a model path that restores onto any number of ranks and slots.

    config.json, tokenizer files      as in the Hugging Face directory it was made from
    jaxmoe_checkpoint.json            what makes the directory one of these
    weights/layer_N, weights/model    an Orbax checkpoint for each decoder layer, one for the rest

Experts are stacked by logical expert and chunked one expert a chunk, so each rank reads its own. A
checkpoint for each layer bounds what converting and filling replicas hold in memory to one layer.
FP8 weights are stored as the model holds them, with their scales; `kv_b_proj`, which the model does
not hold in FP8, is then stored dequantised in float32, so that nothing is rounded twice.
"""

import argparse
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxmoe.checkpoint.fp8 import FP8_DTYPE, QUANTIZATION_CONFIG, is_quantised
from jaxmoe.checkpoint.hf import HfCheckpoint
from jaxmoe.checkpoint.parameters import Parameter, build_model, list_parameters, place_array
from jaxmoe.checkpoint.tensor_file import CheckpointError
from jaxmoe.config import ModelConfig
from jaxmoe.plan import QUANTIZATIONS, Quantization, resolve_quantization
from jaxmoe.sharding import EpRanks
from jaxmoe.step import ShardedModel


MARKER_FILE = "jaxmoe_checkpoint.json"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)  # 1 had no FP8 weights
MIN_CHUNK_BYTES = 1 << 20  # below it TensorStore warns, and rightly
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def convert(
    source_dir: Path | str, target_dir: Path | str, *, quantization: str | None = None
) -> Path:
    """Make an Orbax model path of a Hugging Face one; returns it.

    Weights keep their dtype. `quantization` is a name of `resolve_quantization`: "none" gives FP8
    weights the dtype of the embedding, "fp8" quantises others. Everything is written beside the
    target and renamed at the end, so a conversion that was interrupted leaves nothing that loads.

    Raises ValueError when the target exists and is not empty, otherwise as `load_hf` does.
    """
    target_dir = Path(target_dir)
    if target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir())):
        raise ValueError(f"{target_dir} exists and is not empty: converting never overwrites")
    config = ModelConfig.load(source_dir)
    source = HfCheckpoint.open(source_dir, resolve_quantization(quantization, config))
    parameters = [
        dataclasses.replace(parameter, dtype=np.dtype(np.float32))
        if source.quantization and is_quantised(parameter.name) and parameter.dtype != FP8_DTYPE
        else parameter
        for parameter in list_parameters(
            config, config.n_routed_experts, source.dtype, source.quantization
        )
    ]
    source.check(parameters)
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target_dir.name}-", suffix=".partial", dir=target_dir.parent
    ) as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        _write_weights(source, parameters, staged / "weights")
        _write_config(source, staged)
        for name in COPIED_FILES:
            if (source.model_dir / name).is_file():
                shutil.copyfile(source.model_dir / name, staged / name)
        marker = {"format_version": FORMAT_VERSION}
        (staged / MARKER_FILE).write_text(json.dumps(marker), encoding="utf-8")
        os.rename(staged, target_dir)
    return target_dir


def is_orbax(model_dir: Path) -> bool:
    """Whether `convert` made this directory."""
    return (model_dir / MARKER_FILE).is_file()


def load_orbax(
    model_dir: Path | str,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    num_slots: int | None = None,
    slots: np.ndarray | None = None,
    ranks: EpRanks | None = None,
) -> ShardedModel:
    """As `load_hf`, from a directory made by `convert`, which must have stored FP8 weights for a
    model in FP8 and others for one that is not; else ValueError.

    Without redundant slots, and with all ranks on the mesh, each rank restores exactly its own
    experts. Otherwise a layer's experts pass through host memory, one layer at a time.
    """
    model_dir = Path(model_dir)
    _check_marker(model_dir)
    config = ModelConfig.load(model_dir)
    if (stored := resolve_quantization(None, config)) != quantization:
        held, wanted = (how.value if how else "none" for how in (stored, quantization))
        raise ValueError(
            f"{model_dir} holds weights of --quantization {held}, not {wanted}: convert its source "
            f"with --quantization {wanted}"
        )

    def load(parameters: Sequence[Parameter], own_slots: np.ndarray) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}
        with ocp.PyTreeCheckpointer() as checkpointer:
            for part, members in _parts(parameters):
                path = model_dir / "weights" / part
                arrays |= _restore_part(checkpointer, path, members, config, mesh, own_slots)
        return arrays

    return build_model(
        config,
        mesh,
        dtype=dtype,
        quantization=quantization,
        num_slots=num_slots,
        slots=slots,
        ranks=ranks,
        load=load,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxmoe convert`."""
    parser.add_argument("--model-path", required=True, metavar="M", help="a Hugging Face directory")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="the directory to make; absent or empty"
    )
    parser.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="fp8: store FP8 weights, others are quantised; none: dequantise FP8 weights; default: "
        "store what the checkpoint has",
    )


def run(args: argparse.Namespace) -> int:
    """`jaxmoe convert`."""
    print(convert(args.model_path, args.output, quantization=args.quantization))
    return 0


def _parts(parameters: Sequence[Parameter]) -> Iterator[tuple[str, list[Parameter]]]:
    """The parameters by the Orbax checkpoint they are in."""
    parts: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        part = "model" if parameter.layer is None else f"layer_{parameter.layer}"
        parts.setdefault(part, []).append(parameter)
    yield from parts.items()


def _write_weights(
    source: HfCheckpoint, parameters: Sequence[Parameter], weights_dir: Path
) -> None:
    config = source.config
    identity = np.arange(config.n_routed_experts, dtype=np.int32)
    slots = np.broadcast_to(identity, (config.num_moe_layers, config.n_routed_experts))
    with ocp.PyTreeCheckpointer() as checkpointer:
        for part, members in _parts(parameters):
            arrays = {
                parameter.name: source.read_rows(parameter, range(parameter.shape[0]), slots)
                for parameter in members
            }
            save_args = {
                parameter.name: ocp.SaveArgs(
                    chunk_byte_size=max(arrays[parameter.name][0].nbytes, MIN_CHUNK_BYTES),
                    shard_axes=(0,),
                )
                if parameter.is_expert
                else ocp.SaveArgs()
                for parameter in members
            }
            checkpointer.save((weights_dir / part).absolute(), arrays, save_args=save_args)


def _write_config(source: HfCheckpoint, target_dir: Path) -> None:
    raw = json.loads((source.model_dir / "config.json").read_text(encoding="utf-8"))
    if source.quantization is None:
        raw.pop("quantization_config", None)
    else:
        raw.setdefault("quantization_config", QUANTIZATION_CONFIG)
    (target_dir / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")


def _restore_part(
    checkpointer: ocp.PyTreeCheckpointer,
    path: Path,
    parameters: Sequence[Parameter],
    config: ModelConfig,
    mesh: Mesh,
    slots: np.ndarray,
) -> dict[str, jax.Array]:
    _check_part(checkpointer, path, parameters, config.n_routed_experts)
    num_experts = config.n_routed_experts
    is_direct = slots.shape[1] == num_experts and (slots == np.arange(num_experts)[None]).all()
    items: dict[str, Any] = {}
    restore_args: dict[str, ocp.RestoreArgs] = {}
    for parameter in parameters:
        if is_direct or not parameter.is_expert:
            placed = jax.NamedSharding(mesh, parameter.spec)
            item = jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=placed)
            items[parameter.name] = item
            restore_args[parameter.name] = ocp.ArrayRestoreArgs(
                sharding=placed, global_shape=parameter.shape, dtype=parameter.dtype
            )
        else:
            items[parameter.name] = 0  # a leaf; the arguments say what it becomes
            restore_args[parameter.name] = ocp.RestoreArgs(restore_type=np.ndarray)
    try:
        restored = checkpointer.restore(
            path.absolute(), args=ocp.args.PyTreeRestore(item=items, restore_args=restore_args)
        )
    # Orbax and TensorStore raise bare Exceptions, among others, for damaged chunks.
    except Exception as error:
        raise CheckpointError(f"cannot restore {path}: {error}") from error
    for parameter in parameters:
        if parameter.is_expert and not is_direct:
            assert parameter.layer is not None
            experts = slots[parameter.layer - config.first_k_dense_replace]
            logical = restored[parameter.name]
            restored[parameter.name] = place_array(
                parameter,
                mesh,
                lambda rows, logical=logical, experts=experts: logical[
                    experts[rows.start : rows.stop]
                ],
            )
    return restored


def _check_marker(model_dir: Path) -> None:
    path = model_dir / MARKER_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{model_dir} was not made by `jaxmoe convert`: it has no {path.name}"
        )
    try:
        version = json.loads(path.read_text(encoding="utf-8"))["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} does not name a format_version") from error
    if version not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{path}: expected format_version {' or '.join(map(str, READABLE_VERSIONS))}, found "
            f"{version}"
        )


def _check_part(
    checkpointer: ocp.PyTreeCheckpointer,
    path: Path,
    parameters: Sequence[Parameter],
    num_experts: int,
) -> None:
    """Raise CheckpointError unless the Orbax checkpoint holds these parameters."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is missing: expected {parameters[0].name!r} in it")
    try:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
    except Exception as error:
        raise CheckpointError(f"cannot read {path}, an Orbax checkpoint: {error}") from error
    found = metadata.tree if metadata is not None else {}
    for parameter in parameters:
        shape = (num_experts, *parameter.shape[1:]) if parameter.is_expert else parameter.shape
        if parameter.name not in found:
            raise CheckpointError(f"tensor {parameter.name!r} is missing from {path}")
        if tuple(found[parameter.name].shape) != shape:
            raise CheckpointError(
                f"tensor {parameter.name!r} in {path}: expected shape {list(shape)}, "
                f"found {list(found[parameter.name].shape)}"
            )
    if unknown := set(found) - {parameter.name for parameter in parameters}:
        raise CheckpointError(
            f"{path} has tensors its config.json has no place for: {sorted(unknown)}"
        )
