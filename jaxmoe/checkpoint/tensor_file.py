"""Safetensors files: where each tensor's bytes are, and reading them one tensor at a time.

safetensors' own numpy reader cannot read float8, and its errors name neither tensor nor file, so
the header (eight bytes of length, then JSON) is read here. Bytes are read, not memory-mapped: a
file that shrinks meanwhile gives an error instead of a bus error, and pages of the file do not
count as this process's memory.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The source dtypes that can be read; a file may hold others as long as nobody reads them."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the tensor and the file."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in its file. `dtype` is safetensors' name for it."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self) -> np.ndarray:
        """An array of its own, in the stored dtype."""
        dtype = DTYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.path} has dtype {self.dtype}, "
                f"expected one of {', '.join(DTYPES)}"
            )
        data = np.fromfile(self.path, np.uint8, count=self.num_bytes, offset=self.offset)
        if data.size != self.num_bytes or data.size != math.prod(self.shape) * dtype.itemsize:
            raise CheckpointError(
                f"tensor {self.name!r} in {self.path}: expected "
                f"{math.prod(self.shape) * dtype.itemsize} bytes for {self.dtype} of shape "
                f"{list(self.shape)}, found {data.size}"
            )
        return data.view(dtype).reshape(self.shape)


def has_tensors(model_dir: Path) -> bool:
    """Whether the directory looks like a safetensors checkpoint."""
    return (model_dir / SINGLE_FILE).is_file() or (model_dir / INDEX_FILE).is_file()


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of a Hugging Face directory. Reads headers only, and checks all of them.

    A single `model.safetensors` wins over an index, as it does in transformers.
    """
    if (model_dir / SINGLE_FILE).is_file():
        return read_header(model_dir / SINGLE_FILE)
    index_path = model_dir / INDEX_FILE
    if not index_path.is_file():
        raise CheckpointError(f"{model_dir} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names_of: dict[str, list[str]] = {}
        for name, file_name in weight_map.items():
            names_of.setdefault(file_name, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index_path} is not an index: expected JSON with a weight_map of tensor to file "
            f"({error!r})"
        ) from error
    tensors: dict[str, StoredTensor] = {}
    for file_name, names in names_of.items():
        path = model_dir / file_name
        if path.parent != model_dir:
            raise CheckpointError(
                f"{index_path} puts tensor {names[0]!r} in {file_name!r}, outside the directory"
            )
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing: {index_path.name} puts tensor {names[0]!r} and "
                f"{len(names) - 1} others in it"
            )
        found = read_header(path, names)
        for name in names:
            if name not in found:
                raise CheckpointError(
                    f"tensor {name!r} is not in {path}, where {index_path.name} puts it"
                )
            tensors[name] = found[name]
    return tensors


def read_header(path: Path, names: Iterable[str] = ()) -> dict[str, StoredTensor]:
    """The tensors of one file. `names` are those expected in it, for the error messages."""
    size = path.stat().st_size
    expected = next(iter(names), None)
    wanted = f" (expected tensor {expected!r} and others in it)" if expected else ""
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + header_size > size:
            raise CheckpointError(
                f"{path} is truncated: {size} bytes end inside its header{wanted}"
            )
        raw = file.read(header_size)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = {}
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            tensors[name] = StoredTensor(
                name=name,
                path=path,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + header_size + start,
                num_bytes=end - start,
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no safetensors header{wanted}") from error
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset + tensor.num_bytes > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name!r} of shape {list(tensor.shape)} ends "
                f"at byte {tensor.offset + tensor.num_bytes}, the file has {size}"
            )
    return tensors
