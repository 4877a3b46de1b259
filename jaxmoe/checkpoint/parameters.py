"""The model's parameters as checkpoints see them, and the model made from loaded ones.

A parameter's path in the module tree is its Hugging Face name. Experts are the exception: the model
stacks them by physical slot, Hugging Face has three matrices for each logical expert.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxmoe import sharding
from jaxmoe.checkpoint.fp8 import SCALE_SUFFIX
from jaxmoe.checkpoint.tensor_file import CheckpointError
from jaxmoe.config import ModelConfig
from jaxmoe.eplb import placement as placements
from jaxmoe.plan import Quantization
from jaxmoe.step import ShardedModel, abstract_model, path_names


EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices that lie one under the other in a slot of each stacked parameter."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of the model.

    Attributes:
      name: its path, "model.layers.3.mlp.experts.gate_up_proj".
      spec: how it lies on the mesh.
      layer: the decoder layer it belongs to, None outside of them.
      is_expert: stacked by physical slot.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    layer: int | None
    is_expert: bool

    @property
    def is_scale(self) -> bool:
        """Whether it is the scales of an FP8 weight, whose name this is without the suffix."""
        return self.name.endswith(SCALE_SUFFIX)

    def weight_names(self, expert: int) -> tuple[str, ...]:
        """The Hugging Face names of the weights it is made from or the scales of: of experts, those
        of one slot."""
        name = self.name.removesuffix(SCALE_SUFFIX)
        if not self.is_expert:
            return (name,)
        prefix, kind = name.rsplit(".", 1)
        return tuple(f"{prefix}.{expert}.{matrix}.weight" for matrix in EXPERT_MATRICES[kind])


def list_parameters(
    config: ModelConfig,
    num_slots: int,
    dtype: DTypeLike,
    quantization: Quantization | None = None,
) -> list[Parameter]:
    """In the order in which the state's leaves are flattened. Raises as `abstract_model` does."""
    _, abstract = abstract_model(config, num_slots, dtype, quantization)
    parameters = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        names = path_names(path)
        parameters.append(
            Parameter(
                name=".".join(map(str, names)),
                shape=tuple(leaf.shape),
                dtype=np.dtype(leaf.dtype),
                spec=sharding.parameter_spec(names),
                layer=int(names[2]) if names[1] == "layers" else None,
                is_expert="experts" in names,
            )
        )
    return parameters


def checkpoint_shapes(
    parameters: Sequence[Parameter], num_experts: int
) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor these parameters are made from, but scales: they
    are wherever there are FP8 weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in parameters:
        if parameter.is_scale:
            continue
        if not parameter.is_expert:
            shapes[parameter.name] = parameter.shape
            continue
        _, rows, columns = parameter.shape
        for expert in range(num_experts):
            names = parameter.weight_names(expert)
            shapes.update(dict.fromkeys(names, (rows // len(names), columns)))
    return shapes


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None,
    num_slots: int | None,
    slots: np.ndarray | None,
    ranks: sharding.EpRanks | None,
    load: Callable[[Sequence[Parameter], np.ndarray], dict[str, jax.Array]],
) -> ShardedModel:
    """The model with the arrays that `load(parameters, own_slots)` returns by name, where
    `own_slots` says which expert each slot on the mesh holds, [L, p]."""
    num_experts = config.n_routed_experts
    ranks = ranks or sharding.EpRanks(mesh.size)
    ep_size = ranks.ep_size
    if num_slots is None:
        num_slots = placements.num_expert_slots(num_experts, ep_size)
    if num_slots % ep_size:
        suggestion = math.ceil(num_slots / ep_size) * ep_size
        raise ValueError(
            f"num_physical_experts ({num_slots}) must be divisible by ep_size ({ep_size}); "
            f"{suggestion} would be"
        )
    if slots is None:
        placement = placements.trivial_placement(config.num_moe_layers, num_experts, num_slots)
    else:
        if slots.shape != (config.num_moe_layers, num_slots):
            raise ValueError(
                f"slots must be [{config.num_moe_layers}, {num_slots}], got {slots.shape}"
            )
        placement = placements.make_placement(slots, num_experts)
    start, count = (n * (num_slots // ep_size) for n in (ranks.first, mesh.size))
    graphdef, abstract = abstract_model(config, count, dtype, quantization)
    parameters = list_parameters(config, count, dtype, quantization)
    arrays = load(parameters, np.asarray(placement.physical_to_logical)[:, start : start + count])
    params = jax.tree.unflatten(
        jax.tree.structure(abstract), [arrays[parameter.name] for parameter in parameters]
    )
    return ShardedModel(
        config=config,
        mesh=mesh,
        dtype=dtype,
        quantization=quantization,
        graphdef=graphdef,
        params=params,
        placement=jax.device_put(placement, sharding.replicated(mesh)),
        ranks=ranks,
    )


def place_array(parameter: Parameter, mesh: Mesh, read: Callable[[range], np.ndarray]) -> jax.Array:
    """A parameter on the mesh. `read(rows)` gives rows of its leading dimension: all of them once
    for a replicated parameter, each rank's slots for experts."""
    num_rows = parameter.shape[0]

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        rows = range(*index[0].indices(num_rows)) if index else range(num_rows)
        shard = read(rows)
        expected = (len(rows), *parameter.shape[1:])
        if shard.shape != expected:
            raise CheckpointError(
                f"parameter {parameter.name!r}: expected shape {expected}, found {shard.shape}"
            )
        return shard.astype(parameter.dtype, copy=False)

    return jax.make_array_from_callback(
        parameter.shape, jax.NamedSharding(mesh, parameter.spec), read_shard, dtype=parameter.dtype
    )
