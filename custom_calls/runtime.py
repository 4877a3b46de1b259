"""The expert-parallel group of this process: who exchanges tokens, and the memory it takes.

    bootstrap(mesh, spec)  ->  EpGroup  ->  shutdown()

A *member* is a process; it drives consecutive ranks, one for each device of its mesh. The group
belongs to this package and not to JAX's set of processes: who takes part is a table that may change
between steps, and programs compiled for the group's largest size stay as they are.

Ranks that are not active are no part of an exchange, whether their programs run or not: they send
and get nothing, nobody waits for them, and their processes may stall or end. No token is dropped
for that: one for an expert of an inactive rank ends the step on all members with an error, so the
placement must avoid these; one that an inactive rank has for any expert fails that rank's program.

There is one group in a process, frozen from `bootstrap` to `shutdown`, since compiled programs find
it by their device. Arrays and models are not known here.
"""

import atexit
import dataclasses
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from custom_calls import cpu_library
from custom_calls.deep_ep import sizes


if TYPE_CHECKING:
    from custom_calls import _cpu, _cuda

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Link:
    """A model of the link between ranks, to study overlap on CPUs. No claim about any machine.

    What a rank sends to others leaves it one byte after another, and arrives a latency later.

    Attributes:
      latency: seconds.
      bandwidth: bytes a second; None, no limit.
    """

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if self.latency < 0:
            raise ValueError(f"the link's latency must not be negative, got {self.latency}")
        if self.bandwidth is not None and self.bandwidth <= 0:
            raise ValueError(f"the link's bandwidth must be positive, got {self.bandwidth}")


PLATFORMS = {"loopback": "cpu", "deepep": "gpu"}
"""What the backends of a group run on."""


@dataclasses.dataclass(frozen=True)
class EpSpec:
    """What a group is sized for; the same on all members.

    Attributes:
      max_ep_size: the most ranks there may be.
      slots_per_rank: physical experts of a rank.
      hidden_size: numbers of a token's row.
      top_k: experts of a token.
      normal_tokens: the most tokens a rank sends in one normal dispatch; 0: that mode is not used.
      low_latency_tokens: the same of low-latency dispatch.
      itemsize: bytes of a number in the activations' dtype.
      num_micro_batches: exchanges that may be under way at a time.
      timeout: seconds a rank may keep the others waiting.
      backend: a name in `PLATFORMS`.
      link: see `Link`; loopback only.
      normal_sms, low_latency_sms: multiprocessors that exchanges take; None: all. deepep only.
    """

    max_ep_size: int
    slots_per_rank: int
    hidden_size: int
    top_k: int
    normal_tokens: int = 0
    low_latency_tokens: int = 0
    itemsize: int = 2
    num_micro_batches: int = 1
    timeout: float = 120.0
    backend: str = "loopback"
    link: Link | None = None
    normal_sms: int = sizes.NORMAL_SMS
    low_latency_sms: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in PLATFORMS:
            raise ValueError(f"backend must be one of {tuple(PLATFORMS)}, got {self.backend!r}")
        if self.link is not None and self.backend != "loopback":
            raise ValueError(f"only loopback's link can be modelled, got {self.backend!r}")
        for name in ("max_ep_size", "slots_per_rank", "hidden_size", "top_k", "itemsize",
                     "num_micro_batches", "normal_sms", "low_latency_sms"):  # fmt: skip
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("normal_tokens", "low_latency_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.timeout <= 0:
            raise ValueError(f"timeout must be positive, got {self.timeout}")
        rows = self.max_ep_size * max(self.normal_tokens, self.low_latency_tokens * self.top_k)
        if rows > 2**31 - 1:
            raise ValueError(f"a group of {rows} rows is too large: they are numbered in 32 bits")

    @property
    def window_bytes(self) -> int:
        """Memory of a loopback rank for one exchange: what it sends, or what comes back to it."""
        row = self.hidden_size * self.itemsize
        tokens = max(self.normal_tokens, self.low_latency_tokens)
        sent = 256 + tokens * (row + 8 * self.top_k)
        returned = max(
            self.normal_tokens * self.max_ep_size * row, self.low_latency_tokens * self.top_k * row
        )
        return max(sent, returned)

    @property
    def num_channels(self) -> int:
        return 2 * self.num_micro_batches  # dispatch and combine of each

    @property
    def normal_bytes(self) -> int:
        """Memory of a deepep rank for a micro-batch in normal mode."""
        if self.normal_tokens == 0:
            return 0
        row = self.hidden_size * self.itemsize
        return sizes.normal_bytes(row, self.max_ep_size, num_sms=self.normal_sms)

    @property
    def low_latency_bytes(self) -> int:
        """Memory of a deepep rank for a micro-batch in low-latency mode.

        Tokens are rounded up to 128, the most that a slab's alignment adds.
        """
        tokens = -(-self.low_latency_tokens // 128) * 128
        experts = self.max_ep_size * self.slots_per_rank
        return tokens and sizes.low_latency_bytes(tokens, self.hidden_size, experts)

    @property
    def bytes_per_rank(self) -> int:
        """Memory of a rank for all exchanges."""
        if self.backend == "loopback":
            return self.num_channels * self.window_bytes
        return self.num_micro_batches * (self.normal_bytes + self.low_latency_bytes)


@dataclasses.dataclass(frozen=True)
class Members:
    """The processes of a group, and which one this is.

    Attributes:
      num_members, member: as `--nnodes` and `--node-rank`.
      name: of the group, the same on all members and no other group's on this host.
      join_timeout: seconds the members may take to come.
    """

    num_members: int = 1
    member: int = 0
    name: str = ""
    join_timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.num_members < 1 or not 0 <= self.member < self.num_members:
            raise ValueError(
                f"member ({self.member}) must be between 0 and num_members - 1 "
                f"({self.num_members - 1})"
            )
        if self.num_members > 1 and (not self.name or "/" in self.name or len(self.name) > 200):
            raise ValueError(
                "a group of several processes needs a name of at most 200 characters without "
                f"'/', got {self.name!r}"
            )


class EpGroup:
    """The group as its member sees it. Between steps, one thread of each member that has an active
    rank may call `agree`, `wait`, `set_active` and `recover`, and of any other `wait_active`; a
    call that needs the others raises RuntimeError, naming the member, when one has died or keeps it
    waiting."""

    def __init__(self, mesh: Mesh, spec: EpSpec, members: Members):
        if (reason := cpu_library.missing()) is not None:
            raise RuntimeError(reason)
        from custom_calls import _cpu

        devices = list(mesh.devices.flat)
        self.spec = spec
        self.members = members
        self.first_rank = members.member * len(devices)
        self.local_ranks = range(self.first_rank, self.first_rank + len(devices))
        needed = members.num_members * len(devices)
        if needed > spec.max_ep_size:
            raise ValueError(
                f"{members.num_members} members of {len(devices)} devices are {needed} ranks, "
                f"max_ep_size is {spec.max_ep_size}"
            )
        if (platform := devices[0].platform) != PLATFORMS[spec.backend]:
            raise ValueError(
                f"{spec.backend!r} runs on {PLATFORMS[spec.backend]!r} devices, got {platform!r}"
            )
        is_loopback = spec.backend == "loopback"
        if not is_loopback:
            from custom_calls.deep_ep import library

            library.check(spec)
        link = spec.link or Link()
        logger.info(
            "expert-parallel group (%s): %d of at most %d ranks in %d processes, %d bytes a rank%s",
            spec.backend, needed, spec.max_ep_size, members.num_members, spec.bytes_per_rank,
            f"; modelled link: {link}" if spec.link else "",
        )  # fmt: skip
        self._handle: _cpu.EpGroup | None = _cpu.EpGroup(
            name=members.name,
            description=repr(spec),
            num_members=members.num_members,
            member=members.member,
            max_ranks=spec.max_ep_size,
            first_rank=self.first_rank,
            devices=[_ordinal(device) for device in devices],
            num_channels=spec.num_channels if is_loopback else 0,
            window_bytes=spec.window_bytes if is_loopback else 0,
            timeout=spec.timeout,
            join_timeout=members.join_timeout,
            latency=link.latency,
            bandwidth=link.bandwidth or 0.0,
        )
        self._devices: _cuda.DeepEpGroup | None = None
        if is_loopback:
            _cpu.set_ep_group(self._handle)
        else:
            self._devices = self._connect([_ordinal(device) for device in devices])

    def _connect(self, devices: Sequence[int]) -> "_cuda.DeepEpGroup":
        """The memory of this member's GPUs, open to all ranks as theirs is to these."""
        from custom_calls import _cuda
        from custom_calls.deep_ep import library

        group = library.make_group(self.spec, self.first_rank, devices)
        handles = [b""] * self.spec.max_ep_size
        if self.num_members > 1:
            for i, own in enumerate(group.handles()):
                words = struct.unpack("<8q", own)
                for member, theirs in enumerate(self.agree(words, timeout=self.spec.timeout)):
                    handles[member * len(devices) + i] = struct.pack("<8q", *theirs)
        group.connect(handles)
        group.set_active(self.active_ranks)
        self.agree((), timeout=self.spec.timeout)  # nobody sends before all are connected
        _cuda.set_deep_ep_group(group)
        return group

    @property
    def _group(self) -> "_cpu.EpGroup":
        if self._handle is None:
            raise RuntimeError("this process has left the expert-parallel group")
        return self._handle

    def leave(self) -> None:
        """Give the memory back; whoever still has this object has nothing any more."""
        from custom_calls import _cpu

        if self._devices is None:
            _cpu.set_ep_group(None)
        else:
            from custom_calls import _cuda

            _cuda.set_deep_ep_group(None)
        self._devices = None
        self._handle = None

    @property
    def num_members(self) -> int:
        return self.members.num_members

    @property
    def member(self) -> int:
        return self.members.member

    @property
    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that exchange tokens; at first, those of all members.

        What a member without an active rank knows is as old as its last `wait_active`.
        """
        return tuple(self._group.active())

    @property
    def failure(self) -> str | None:
        """What ended the exchanges of all members, until they `recover`."""
        failure = self._group.failure() or None
        if failure is None and self._devices is not None and (lost := self._devices.lost()):
            failure = f"ranks {lost} have not answered in time"
        return failure

    def counters(self) -> Mapping[str, int | float]:
        """Of this member's ranks since `bootstrap`: exchanges begun and ended, ends that had to
        wait, rows that stayed on their rank, rows and bytes that left it; the seconds that tokens
        were under way, from a rank's start until all had come, and those of them that its finish
        waited. With deepep, kernels launched since the process started, by name."""
        if self._devices is None:
            return self._group.counters()
        from custom_calls.deep_ep import library

        return library.launches()

    def agree(
        self, proposal: Sequence[int], *, timeout: float | None = None
    ) -> list[tuple[int, ...]]:
        """The proposals of the members with active ranks, by member, at most 1024 numbers each.

        Waits for all of them; without timeout (seconds) as long as they live.
        """
        all_of_them = self._group.agree(list(proposal), -1.0 if timeout is None else timeout)
        return [tuple(one) for one in all_of_them]

    def wait(self) -> None:
        """Return when `wake` has been called since the last time, or a peer waits in `agree`."""
        self._group.wait()

    def wake(self) -> None:
        """End this member's `wait`, from any thread."""
        self._group.wake()

    def set_active(self, ranks: Sequence[int]) -> None:
        """From the next step on these ranks exchange tokens; the same on all members.

        The results of the step before must have come. When they have not, or members ask for
        different ranks, or for one that has no living process, nothing changes and all raise
        RuntimeError. Members that get their first active rank come in by `wait_active`; the next
        exchange waits for them. With deepep, all ranks of a process are active or none, otherwise
        ValueError.
        """
        wanted = sorted(set(ranks))
        if self._devices is not None:
            size = len(self.local_ranks)
            owners = [rank // size for rank in wanted]
            for member in owners:
                if (count := owners.count(member)) < size:
                    raise ValueError(
                        f"all ranks of a process are active or none with 'deepep', got {wanted}: "
                        f"{count} of the {size} of member {member}"
                    )
        self._group.set_active(wanted)
        self._clear_devices()

    def wait_active(self, *, timeout: float | None = None) -> bool:
        """Return True as soon as this member has an active rank, which it may have already.

        False after timeout (seconds). Raises RuntimeError when all active members are gone.
        """
        was_active = self._is_active()
        is_active = self._group.wait_active(-1.0 if timeout is None else timeout)
        if is_active and not was_active:
            self._clear_devices()
        return is_active

    def recover(self) -> None:
        """After a failure, on all members: forget what was under way and begin anew."""
        self._group.recover()
        self._clear_devices()

    def _is_active(self) -> bool:
        return not set(self.active_ranks).isdisjoint(self.local_ranks)

    def _clear_devices(self) -> None:
        if self._devices is None:
            return
        self._devices.clear()
        self._devices.set_active(self.active_ranks)
        if self._is_active():
            self.agree((), timeout=self.spec.timeout)  # nobody sends before all have forgotten


ALONE = Members()

_current: EpGroup | None = None


def bootstrap(mesh: Mesh, spec: EpSpec, members: Members = ALONE) -> EpGroup:
    """Make, or join, this process's group; returns when all members have come.

    The devices of the mesh, in order, are the member's ranks. Again with the same arguments it
    gives the same group. Raises RuntimeError when there is another one or the members do not come
    or differ, and ValueError for sizes that cannot be.
    """
    global _current
    if _current is None:
        _current = EpGroup(mesh, spec, members)
        atexit.register(shutdown)
        if spec.backend == "deepep":
            from custom_calls.ep import deep_ep

            deep_ep.warm_up(mesh)
    elif (spec, members) != (_current.spec, _current.members):
        raise RuntimeError(
            f"this process has an expert-parallel group for {_current.spec} and "
            f"{_current.members}; call custom_calls.runtime.shutdown() before making one for "
            f"{spec} and {members}"
        )
    return _current


def current() -> EpGroup:
    """This process's group. Raises RuntimeError when there is none."""
    if _current is None:
        raise RuntimeError(
            "there is no expert-parallel group: call custom_calls.runtime.bootstrap first"
        )
    return _current


def shutdown() -> None:
    """Leave the group, if there is one, and give its memory back. Nothing may be under way."""
    global _current
    if _current is not None:
        _current.leave()
        _current = None


def _ordinal(device: jax.Device) -> int:
    """What a handler on this device is told to be on."""
    return device.local_hardware_id
