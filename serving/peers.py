"""The members of an expert-parallel group, as the host side sees them.

A member is a process with its own engine, scheduler and loop; its devices are some of the group's
ranks. Dispatch and combine are collective over all ranks, so members take every step together.
`Peers` is what that needs; how members reach each other is not here.
"""

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


MAX_PROPOSAL = 1024
"""Numbers that a member may propose at a time."""


@runtime_checkable
class Peers(Protocol):
    """What the serving loop needs of the members it steps together with."""

    @property
    def num_members(self) -> int: ...

    @property
    def member(self) -> int:
        """Which of them this one is, from 0."""
        ...

    def agree(self, proposal: Sequence[int]) -> list[tuple[int, ...]]:
        """Every member's proposal, of at most `MAX_PROPOSAL` numbers, by member; blocks until all
        have made theirs.

        Raises RuntimeError naming the member when one has died or stalls.
        """
        ...

    def wait(self) -> None:
        """Block until `wake` has been called here since the last `wait`, or a peer is waiting in
        `agree`."""
        ...

    def wake(self) -> None:
        """Let this member's `wait` return. Thread-safe."""
        ...

    def recover(self) -> None:
        """After a failed step, on all members: forget what was in flight.

        Raises RuntimeError when a member is gone.
        """
        ...


class Alone:
    """The only member of its group."""

    num_members = 1
    member = 0

    def __init__(self) -> None:
        self._awake = threading.Event()

    def agree(self, proposal: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(proposal)]

    def wait(self) -> None:
        self._awake.wait()
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def recover(self) -> None:
        pass
