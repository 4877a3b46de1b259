"""Random steps of dispatch and combine with a result that is known, on one member of a group.

As a program, a member: `python -m tests.custom_calls.ep_steps JSON` with the arguments of `Member`
and of a function that runs one. It prints "ready", "step N" now and then, and "done" or
"error: ...".
"""

import contextlib
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from custom_calls import ep, runtime
from custom_calls.layouts import SCALE_BLOCK, ContiguousTokens
from tests.processes import group_name, members


HIDDEN, TOKENS, TOP_K = 16, 6, 3
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
KINDS = ("random", "one_expert", "uneven", "idle_rank", "nothing", "few_experts")
DISPATCHERS = {"normal": ep.NORMAL, "low_latency": ep.LOW_LATENCY}
NO_OPTIONS = {mode: {} for mode in DISPATCHERS}


class Member:
    """A member of a group of `num_members` processes of `devices` ranks each, or more.

    `options` are those of the dispatchers, by mode; only modes in it are used.
    """

    def __init__(
        self,
        name="",
        num_members=1,
        member=0,
        devices=1,
        max_ep_size=None,
        slots_per_rank=2,
        timeout=30.0,
        backend="loopback",
        hidden=HIDDEN,
        dtype="float32",
        options=NO_OPTIONS,
    ):
        self.num_ranks = max_ep_size or num_members * devices
        self.slots = slots_per_rank
        self.hidden = hidden
        self.dtype = jnp.dtype(dtype)
        self.options = options
        self.mesh = Mesh(np.asarray(jax.devices()[:devices]), ("ep",))
        self.local = range(member * devices, (member + 1) * devices)
        self.group = runtime.bootstrap(
            self.mesh,
            runtime.EpSpec(
                max_ep_size=self.num_ranks,
                slots_per_rank=slots_per_rank,
                hidden_size=hidden,
                top_k=TOP_K,
                normal_tokens=TOKENS if "normal" in options else 0,
                low_latency_tokens=TOKENS if "low_latency" in options else 0,
                itemsize=self.dtype.itemsize,
                timeout=timeout,
                backend=backend,
            ),
            runtime.Members(num_members, member, name),
        )
        self.programs = {
            mode: self._compile(DISPATCHERS[mode][backend], **how) for mode, how in options.items()
        }

    def _compile(self, dispatcher_type, **options):
        options = {"alignment": 4} | options
        dispatcher = dispatcher_type(axis_name="ep", slots_per_rank=self.slots, **options)

        def on_rank(x, idx, weights):
            arrived = dispatcher.dispatch_finish(
                dispatcher.dispatch_start(x[0], idx[0], weights[0])
            )
            tokens, first = arrived.tokens, dispatcher.rank() * self.slots
            numbers = tokens.x.astype(jnp.float32)
            if tokens.scale is not None:
                scale = jnp.swapaxes(tokens.scale, -1, -2)[..., : numbers.shape[-2], :]
                numbers *= jnp.repeat(scale, SCALE_BLOCK, -1)[..., : self.hidden]
            if isinstance(tokens, ContiguousTokens):
                row = jnp.arange(tokens.x.shape[0], dtype=jnp.int32)
                expert = first + jnp.searchsorted(tokens.group_starts, row, side="right") - 1
                factor = (1 + expert.astype(jnp.float32))[:, None]
            else:
                expert = first + jnp.arange(self.slots, dtype=jnp.int32)
                factor = (1 + expert.astype(jnp.float32))[:, None, None]
            y = dataclasses.replace(tokens, x=(numbers * factor).astype(self.dtype), scale=None)
            back = dispatcher.combine_start(y, arrived.handle)
            return dispatcher.combine_finish(back, arrived.handle)[None]

        return jax.jit(
            jax.shard_map(
                on_rank, mesh=self.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
            )
        )

    def case(self, seed, active):
        """Of all ranks, from the seed alone: x, experts, weights."""
        rng = np.random.default_rng(seed)
        kind = KINDS[rng.integers(len(KINDS))]
        x = rng.standard_normal((self.num_ranks, TOKENS, self.hidden)).astype(self.dtype)
        slots = np.concatenate([np.arange(self.slots) + rank * self.slots for rank in active])
        if kind == "few_experts":
            slots = rng.permutation(slots)[: max(1, len(slots) // 2)]
        idx = np.full((self.num_ranks, TOKENS, TOP_K), -1, np.int32)
        for rank in active:
            for token in range(TOKENS):
                chosen = rng.permutation(slots)[:TOP_K]
                idx[rank, token, : len(chosen)] = chosen
        if kind == "one_expert":
            idx[idx >= 0] = slots[0]
            idx[..., 1:] = -1
        elif kind == "uneven":
            idx[rng.random(idx.shape) < 0.5] = -1
        elif kind == "idle_rank":
            idx[active[rng.integers(len(active))]] = -1
        elif kind == "nothing":
            idx[:] = -1
        weights = rng.random(idx.shape).astype(np.float32)
        return x, idx, weights

    def step(self, seed, mode, active=None):
        """Run a step and compare with what must come out: expert p gives (p + 1) x."""
        active = list(range(self.num_ranks)) if active is None else list(active)
        x, idx, weights = (a[list(self.local)] for a in self.case(seed, active))
        y = np.asarray(self.programs[mode](x, idx, weights), np.float64)
        factor = np.where(idx >= 0, weights.astype(np.float64) * (idx + 1), 0).sum(-1)
        expected = x.astype(np.float64) * factor[..., None]
        if self.options[mode].get("fp8"):
            assert np.linalg.norm(y - expected) <= 0.04 * np.linalg.norm(expected)
        else:
            tolerance = TOLERANCE[self.dtype.name]
            np.testing.assert_allclose(y, expected, rtol=tolerance, atol=tolerance)


def run(member, num_steps, report_every=None, seed=0):
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        member.step(int(rng.integers(2**31)), rng.choice(list(member.programs)))
        if report_every and step % report_every == 0:
            print(f"step {step}", flush=True)


def draw_memberships(num_ranks, count, seed):
    """Sets of active ranks, one after the other; all of them at last."""
    rng = np.random.default_rng(seed)
    draws = (rng.permutation(num_ranks)[: rng.integers(1, num_ranks + 1)] for _ in range(count - 1))
    return [*(sorted(map(int, draw)) for draw in draws), list(range(num_ranks))]


def run_memberships(member, memberships, num_steps, seed=0, report_every=None):
    """Random steps of these active ranks in turn, `num_steps` of each.

    A member without any of them runs one step, which nobody waits for, and then waits for its turn.
    """
    rng = np.random.default_rng(seed)
    group = member.group
    for index, active in enumerate(memberships):
        if report_every and index % report_every == 0:
            print(f"step {index * num_steps}", flush=True)
        steps = [(int(rng.integers(2**31)), rng.choice(list(member.programs)))
                 for _ in range(num_steps)]  # fmt: skip
        takes_part = not set(active).isdisjoint(member.local)
        if not set(group.active_ranks).isdisjoint(member.local):
            group.set_active(active)
        elif takes_part:
            assert group.wait_active(timeout=60)
        assert group.active_ranks == tuple(active) or not takes_part
        for step_seed, mode in steps if takes_part else steps[:1]:
            member.step(step_seed, mode, active)
    # Whatever took part, it was the same program.
    assert all(program._cache_size() <= 1 for program in member.programs.values())


def run_agreements(member, count):
    """Agree with member 0 and all others so often, then wait for the next time."""
    group = member.group
    for i in range(count):
        expected = [(i,), *((i, other) for other in range(1, group.num_members))]
        assert group.agree([i, group.member]) == expected
    group.wait()  # ended by the others' proposals
    assert group.agree([]) == [(-1,)] + (group.num_members - 1) * [()]


@contextlib.contextmanager
def processes(count, function, *arguments, first=0, tidies_up=True, **member):
    """The members from `first` on of a group of `count`, each a process; and the group's name.

    Of each a `Member`, made with `member`, is run by the function with these arguments.
    """
    name = group_name()

    def told(i):
        about = {"name": name, "num_members": count, "member": i} | member
        return {"member": about, "function": function.__name__, "arguments": arguments}

    with members(__name__, told, range(first, count), name=name, tidies_up=tidies_up) as started:
        yield name, started


def main():
    arguments = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", arguments["member"].get("devices", 1))
    try:
        member = Member(**arguments["member"])
        print("ready", flush=True)
        globals()[arguments["function"]](member, *arguments["arguments"])
        print("done", flush=True)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main()
