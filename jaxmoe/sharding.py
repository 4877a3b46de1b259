"""The mesh and where each array lives on it. The only module that spells a mesh axis.

One axis: expert-parallel ranks. Experts are sharded over it by physical slot, batches and page
pools by their leading rank dimension (attention is data-parallel), everything else is replicated.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


EP_AXIS = "ep"
PER_RANK = PartitionSpec(EP_AXIS)
"""Leading dimension is the rank: batches, page pools, experts."""
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class EpRanks:
    """Which ranks of an expert-parallel group the devices of a mesh are: consecutive ones.

    Attributes:
      ep_size: ranks of the group, over all its processes.
      first: the rank of the mesh's first device.
    """

    ep_size: int
    first: int = 0


def make_mesh(ep_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of the first `ep_size` devices.

    Raises ValueError when there are fewer.
    """
    devices = jax.devices() if devices is None else devices
    if not 1 <= ep_size <= len(devices):
        raise ValueError(
            f"ep_size must be between 1 and the number of devices ({len(devices)}), got {ep_size}"
        )
    return Mesh(np.asarray(devices[:ep_size]), (EP_AXIS,), axis_types=(AxisType.Auto,))


def parameter_spec(path: tuple[str | int, ...]) -> Any:
    """The PartitionSpec of the parameter at this path of the model's state."""
    return PER_RANK if "experts" in path else REPLICATED


def per_rank(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PER_RANK)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, REPLICATED)
