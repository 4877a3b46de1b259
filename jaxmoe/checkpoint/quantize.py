"""FP8 checkpoints in DeepSeek-V3's format, made of bfloat16 or float32 ones.

The matrices of attention, MLPs and experts become float8 (e4m3) with a float32 scale for each block
of 128 x 128, `weight_scale_inv`, by which a block is multiplied to get its values back. Embedding,
head, norms, routers and the MTP layer's `eh_proj` stay as they are, as in DeepSeek's files. Tensors
are read, quantised and written one at a time.
"""

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.checkpoint.fp8 import (
    FP8_BLOCK,
    QUANTIZATION_CONFIG,
    SCALE_SUFFIX,
    is_quantised,
    quantise,
    scale_shape,
)
from jaxmoe.checkpoint.hf import FP8
from jaxmoe.checkpoint.store import COPIED_FILES
from jaxmoe.checkpoint.tensor_file import (
    DTYPES,
    INDEX_FILE,
    CheckpointError,
    StoredTensor,
    find_tensors,
)
from jaxmoe.config import ModelConfig


COPY_BYTES = 16 << 20
HEADER_ALIGNMENT = 8  # of the tensors' bytes in the file, as safetensors writes them


def quantize(source_dir: Path | str, target_dir: Path | str) -> Path:
    """Make an FP8 Hugging Face directory of one in F32, F16 or BF16; returns it.

    Files hold the same tensors as the source's. Everything is written beside the target and renamed
    at the end, so a run that was interrupted leaves nothing that loads.

    Raises ValueError when the target exists and is not empty or the source is quantised already,
    CheckpointError for tensors that cannot be quantised.
    """
    source_dir, target_dir = Path(source_dir), Path(target_dir)
    if target_dir.exists() and (not target_dir.is_dir() or any(target_dir.iterdir())):
        raise ValueError(f"{target_dir} exists and is not empty: quantizing never overwrites")
    config = ModelConfig.load(source_dir)
    tensors = find_tensors(source_dir)
    if config.weight_block_size is not None or any(t.dtype == FP8 for t in tensors.values()):
        raise ValueError(f"{source_dir} is quantised already")
    files: dict[str, list[StoredTensor]] = {}
    for tensor in tensors.values():
        _check(tensor)
        files.setdefault(tensor.path.name, []).append(tensor)
    target_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target_dir.name}-", suffix=".partial", dir=target_dir.parent
    ) as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        weight_map: dict[str, str] = {}
        total_size = 0
        for file_name, members in files.items():
            members.sort(key=lambda tensor: tensor.offset)
            entries = _entries(members)
            _write_file(staged / file_name, members, entries)
            weight_map.update(dict.fromkeys(entries, file_name))
            total_size += max(entry["data_offsets"][1] for entry in entries.values())
        if (source_dir / INDEX_FILE).is_file():
            index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
            (staged / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
        raw = json.loads((source_dir / "config.json").read_text(encoding="utf-8"))
        raw["quantization_config"] = QUANTIZATION_CONFIG
        (staged / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        for name in COPIED_FILES:
            if (source_dir / name).is_file():
                shutil.copyfile(source_dir / name, staged / name)
        os.rename(staged, target_dir)
    return target_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `jaxmoe quantize`."""
    parser.add_argument("--model-path", required=True, metavar="M", help="a Hugging Face directory")
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="the directory to make; absent or empty"
    )


def run(args: argparse.Namespace) -> int:
    """`jaxmoe quantize`."""
    print(quantize(args.model_path, args.output))
    return 0


def _check(tensor: StoredTensor) -> None:
    if is_quantised(tensor.name) and (len(tensor.shape) != 2 or tensor.dtype not in DTYPES):
        raise CheckpointError(
            f"tensor {tensor.name!r} in {tensor.path}: expected a matrix in F32, F16 or BF16, "
            f"found {tensor.dtype} of shape {list(tensor.shape)}"
        )


def _entries(tensors: list[StoredTensor]) -> dict[str, dict[str, Any]]:
    """The header of the file that will hold these, and the scales of those it quantises.

    The widest elements come first: that keeps every tensor aligned, whatever size a float8 one has.
    """
    found: list[tuple[str, str, tuple[int, ...], int]] = []
    for tensor in tensors:
        if is_quantised(tensor.name):
            grid = scale_shape(tensor.shape, FP8_BLOCK)
            found.append((tensor.name + SCALE_SUFFIX, "F32", grid, 4 * math.prod(grid)))
            found.append((tensor.name, FP8, tensor.shape, math.prod(tensor.shape)))
        else:
            found.append((tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes))
    found.sort(key=lambda entry: entry[3] // max(math.prod(entry[2]), 1), reverse=True)
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name, dtype, shape, size in found:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return entries


def _write_file(
    path: Path, tensors: list[StoredTensor], entries: Mapping[str, Mapping[str, Any]]
) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    start = 8 + len(header)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            for name, data in _stored(tensor):
                offset = start + entries[name]["data_offsets"][0]
                for chunk in data:
                    file.seek(offset)
                    file.write(chunk)
                    offset += len(chunk)


def _stored(tensor: StoredTensor) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
    """The names and bytes the target has of a tensor of the source."""
    if not is_quantised(tensor.name):
        yield tensor.name, _copied(tensor)
        return
    values = tensor.read()
    if not np.isfinite(values).all():
        raise CheckpointError(f"tensor {tensor.name!r} in {tensor.path} is not finite")
    for name, array in zip(
        (tensor.name, tensor.name + SCALE_SUFFIX), quantise(values, FP8_BLOCK), strict=True
    ):
        yield name, iter([array.reshape(-1).view(np.uint8).data])


def _copied(tensor: StoredTensor) -> Iterator[bytes]:
    """The bytes as they are, also of dtypes nothing here can read."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        left = tensor.num_bytes
        while left:
            chunk = file.read(min(left, COPY_BYTES))
            if not chunk:
                raise CheckpointError(f"tensor {tensor.name!r} in {tensor.path} is cut short")
            left -= len(chunk)
            yield chunk
