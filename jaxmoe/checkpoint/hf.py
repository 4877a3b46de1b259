"""Hugging Face directories, straight into sharded arrays.

Tensors are read one at a time, so the host holds at most one parameter besides the model itself:
a matrix, or a layer's stacked experts. FP8 weights go to the devices as they are when the model
runs in FP8, `kv_b_proj` excepted (see `model.mla`), and are dequantised when it does not; other
weights are quantised on the way when it does, as `jaxmoe quantize` would.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxmoe.checkpoint.fp8 import (
    FP8_BLOCK,
    FP8_DTYPE,
    SCALE_SUFFIX,
    block_scales,
    dequantise,
    is_quantised,
    quantise,
    scale_shape,
)
from jaxmoe.checkpoint.parameters import (
    Parameter,
    build_model,
    checkpoint_shapes,
    list_parameters,
    place_array,
)
from jaxmoe.checkpoint.tensor_file import DTYPES, CheckpointError, StoredTensor, find_tensors
from jaxmoe.config import ModelConfig
from jaxmoe.plan import Quantization
from jaxmoe.sharding import EpRanks
from jaxmoe.step import ShardedModel


FP8 = "F8_E4M3"
MAX_NAMES_IN_ERROR = 5


def load_hf(
    model_dir: Path | str,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
    num_slots: int | None = None,
    slots: np.ndarray | None = None,
    ranks: EpRanks | None = None,
) -> ShardedModel:
    """A model from a directory of safetensors, in `dtype` (routers in float32).

    With a `quantization` its matrices are FP8, whatever the directory holds; without, none is.
    `num_slots` is the number of physical experts over all ranks, by default the fewest that hold
    every expert and divide over the ranks; slot p holds expert p % n_routed_experts unless `slots`
    [L, num_slots] says what it holds.

    Raises CheckpointError naming tensor and file, ValueError for an impossible `num_slots` or a
    configuration that cannot run in FP8.
    """
    source = HfCheckpoint.open(model_dir, quantization)

    def load(parameters: Sequence[Parameter], own_slots: np.ndarray) -> dict[str, jax.Array]:
        source.check(parameters)
        return {
            parameter.name: place_array(
                parameter, mesh, lambda rows, p=parameter: source.read_rows(p, rows, own_slots)
            )
            for parameter in parameters
        }

    return build_model(
        source.config,
        mesh,
        dtype=dtype,
        quantization=quantization,
        num_slots=num_slots,
        slots=slots,
        ranks=ranks,
        load=load,
    )


@dataclasses.dataclass(frozen=True)
class HfCheckpoint:
    """An opened directory: its configuration and where its tensors are.

    With a `quantization`, the matrices that `jaxmoe quantize` makes FP8 have that rounding in all
    that is read, whether they are stored so or not.
    """

    model_dir: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    quantization: Quantization | None = None

    @classmethod
    def open(
        cls, model_dir: Path | str, quantization: Quantization | None = None
    ) -> "HfCheckpoint":
        """Reads the configuration and the headers of all files."""
        model_dir = Path(model_dir)
        config = ModelConfig.load(model_dir)
        return cls(model_dir, config, find_tensors(model_dir), quantization)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of what is not quantised, taken from the embedding: `torch_dtype` of a
        configuration is what its author meant, not always what was saved."""
        name = "model.embed_tokens.weight"
        dtype = DTYPES.get(self._tensor(name).dtype)
        if dtype is None or self._tensor(name).dtype == FP8:
            self._refuse_dtype(name, "F32, F16 or BF16")
        return dtype

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise CheckpointError unless the directory holds exactly these parameters.

        A tensor the model has no place for is an error, not a warning: it means that the
        configuration does not describe these weights (a bias, a further norm), and that running
        would give plausible and wrong numbers. Known extras are allowed: multi-token-prediction
        layers, rotary frequencies of old exports, the head of a model that ties it.
        """
        shapes = checkpoint_shapes(parameters, self.config.n_routed_experts)
        for name, shape in shapes.items():
            tensor = self._tensor(name)
            if tensor.shape != shape:
                raise CheckpointError(
                    f"tensor {name!r} in {tensor.path}: expected shape {list(shape)}, "
                    f"found {list(tensor.shape)}"
                )
            if tensor.dtype not in DTYPES:
                self._refuse_dtype(name, "F32, F16, BF16 or F8_E4M3 with a scale")
            if tensor.dtype == FP8:
                self._check_scale(tensor)
            elif self.quantization and self.config.weight_block_size and is_quantised(name):
                # Someone left it out on purpose.
                self._refuse_dtype(name, f"{FP8}, or `--quantization none` for the whole model")
        unknown = [
            name
            for name in self.tensors
            if name not in shapes
            and name.removesuffix(SCALE_SUFFIX) not in shapes
            and not self._is_harmless(name)
        ]
        if unknown:
            more = len(unknown) - MAX_NAMES_IN_ERROR
            raise CheckpointError(
                f"{self.model_dir} has tensors that a {self.config.model_type} of its config.json "
                f"has no place for: {', '.join(map(repr, unknown[:MAX_NAMES_IN_ERROR]))}"
                + (f" and {more} more" if more > 0 else "")
                + f", in {self.tensors[unknown[0]].path}"
            )

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """One tensor of the checkpoint in `dtype`, dequantised if it is FP8."""
        if not self._is_fp8(name):
            return self._tensor(name).read().astype(dtype, copy=False)
        return dequantise(self.read_fp8(name), self.read_scale(name), self._block, dtype)

    def read_fp8(self, name: str) -> np.ndarray:
        """A matrix in float8: as it is stored, or quantised here."""
        if self._tensor(name).dtype == FP8:
            return self._tensor(name).read()
        return quantise(self._read_finite(name), self._block)[0]

    def read_scale(self, name: str) -> np.ndarray:
        """The scales, float32, of a matrix that `read_fp8` reads."""
        if self._tensor(name).dtype == FP8:
            return self._tensor(name + SCALE_SUFFIX).read().astype(np.float32, copy=False)
        return block_scales(self._read_finite(name), self._block)

    def read_rows(self, parameter: Parameter, rows: range, slots: np.ndarray) -> np.ndarray:
        """Rows of a parameter; of stacked experts, the ones `slots` [L, P] puts there."""
        if not parameter.is_expert:
            (name,) = parameter.weight_names(0)
            return self._read_for(parameter, name)[rows.start : rows.stop]
        assert parameter.layer is not None
        experts = slots[parameter.layer - self.config.first_k_dense_replace, rows.start : rows.stop]
        stacked = np.empty((len(rows), *parameter.shape[1:]), parameter.dtype)
        for slot, expert in zip(stacked, experts, strict=True):
            names = parameter.weight_names(int(expert))
            for part, name in zip(np.split(slot, len(names)), names, strict=True):
                part[...] = self._read_for(parameter, name)
        return stacked

    def _read_for(self, parameter: Parameter, name: str) -> np.ndarray:
        if parameter.is_scale:
            return self.read_scale(name)
        if parameter.dtype == FP8_DTYPE:
            return self.read_fp8(name)
        return self.read(name, parameter.dtype)

    def _is_fp8(self, name: str) -> bool:
        is_stored = self._tensor(name).dtype == FP8
        return is_stored or (self.quantization is not None and is_quantised(name))

    @property
    def _block(self) -> tuple[int, int]:
        return self.config.weight_block_size or FP8_BLOCK

    def _read_finite(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        values = tensor.read()
        if not np.isfinite(values).all():
            raise CheckpointError(f"tensor {name!r} in {tensor.path} is not finite")
        return values

    def _tensor(self, name: str) -> StoredTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"tensor {name!r} is missing from {self.model_dir}, whose config.json asks for it"
            ) from None

    def _check_scale(self, weight: StoredTensor) -> None:
        block = self.config.weight_block_size
        if block is None or len(weight.shape) != 2:
            raise CheckpointError(
                f"tensor {weight.name!r} in {weight.path} is {FP8}: expected a matrix and a "
                "quantization_config with weight_block_size in config.json"
            )
        scale = self._tensor(weight.name + SCALE_SUFFIX)
        expected = scale_shape(weight.shape, block)
        if scale.shape != expected:
            raise CheckpointError(
                f"tensor {scale.name!r} in {scale.path}: expected shape {list(expected)}, a scale "
                f"for each block of {block[0]} x {block[1]}, found {list(scale.shape)}"
            )
        if scale.dtype not in DTYPES or scale.dtype == FP8:
            self._refuse_dtype(scale.name, "F32, F16 or BF16")

    def _refuse_dtype(self, name: str, expected: str) -> NoReturn:
        tensor = self._tensor(name)
        raise CheckpointError(
            f"tensor {name!r} in {tensor.path} of shape {list(tensor.shape)} has dtype "
            f"{tensor.dtype}, expected {expected}"
        )

    def _is_harmless(self, name: str) -> bool:
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        return is_mtp(name, self.config)


def is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, which follows the decoder's."""
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_hidden_layers


def stored_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of this configuration has."""
    parameters = list_parameters(config, config.n_routed_experts, np.float32)
    return checkpoint_shapes(parameters, config.n_routed_experts)
