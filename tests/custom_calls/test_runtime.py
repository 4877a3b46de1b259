"""The expert-parallel group: members, failures, recovery, in one process and in several."""

import random
import re
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from custom_calls import ep, runtime
from custom_calls.runtime import EpSpec, Link, Members
from jaxmoe.compilations import CompilationCounter
from tests.custom_calls.ep_steps import (
    HIDDEN,
    TOKENS,
    TOP_K,
    Member,
    draw_memberships,
    processes,
    run,
    run_agreements,
    run_memberships,
)


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    runtime.shutdown()


def spec(**fields):
    return EpSpec(**{"max_ep_size": 2, "slots_per_rank": 2, "hidden_size": 8, "top_k": 2,
                     "normal_tokens": 4, "itemsize": 4} | fields)  # fmt: skip


def mesh_of(num_devices):
    return Mesh(np.asarray(jax.devices()[:num_devices]), ("ep",))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_random_steps_in_one_process(num_ranks):
    run(Member(devices=num_ranks), 150, seed=num_ranks)


@pytest.mark.slow
def test_ten_thousand_random_steps_do_not_hang():
    member = Member(devices=4)
    run(member, 10_000)
    counters = member.group.counters()
    assert counters["starts"] == counters["finishes"] == 4 * 2 * 10_000
    assert counters["remote_rows"] > counters["local_rows"] > 0
    assert counters["remote_bytes"] == counters["remote_rows"] * HIDDEN * 4


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 2), (3, 1), (4, 2)])
def test_random_steps_in_several_processes(count, devices):
    with processes(count, run, 300, devices=devices) as (_, members):
        for member in members:
            assert member.read_until("done|error")[0] == "done", member.lines


@pytest.mark.slow
def test_a_member_that_is_stopped_ends_the_others_in_words():
    """Nobody can tell, but it keeps the others waiting for longer than it may."""
    with processes(3, run, 10**9, 20, tidies_up=False, timeout=2.0) as (_, members):
        victim, pid, begun = strike(members, signal.SIGSTOP)
        for i in set(range(3)) - {victim}:
            error = members[i].read_until("done|error").string
            assert re.search(f"for rank {victim} .member {victim}, process {pid}", error)
        assert time.monotonic() - begun < 5


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["steps", "changes_of_active_ranks"])
def test_a_member_that_is_killed_ends_the_others_in_words(changes):
    """All but those who have no active rank, and nothing to do with it, name who it was."""
    what = (run, 10**9, 20)
    if changes:
        what = (run_memberships, draw_memberships(4, 5000, seed=random.randrange(99)), 2, 0, 20)
    with processes(4, *what) as (_, members):
        victim, pid, begun = strike(members, signal.SIGKILL)
        errors = [members[i].read_until("done|error").string for i in {*range(4)} - {victim}]
        assert time.monotonic() - begun < 5
        died = f"member {victim} (process {pid}, rank {victim}) has died"
        for error in errors:
            assert died in error or (changes and "no active member is left" in error)
        assert any(died in error for error in errors)


def strike(members, how):
    """Send a member the signal while all are at it: which one, its process, and when."""
    for member in members:
        member.read_until("step")
    time.sleep(random.random() / 2)
    victim = random.randrange(len(members))
    members[victim].process.send_signal(how)
    return victim, members[victim].process.pid, time.monotonic()


@pytest.mark.slow
def test_abandoned_memory_is_removed():
    with processes(2, run, 10**9, 20) as (name, members):
        for member in members:
            member.read_until("step")
        # Not afterwards: another test's group may start then, and tidy up.
        assert Path(f"/dev/shm/jaxmoe-{name}").exists()
        for member in members:
            member.process.kill()
            member.process.wait()
        with pytest.raises(RuntimeError, match=r"member 1 has not come within"):
            # Whoever starts next tidies up; its own group does not come to be.
            runtime.bootstrap(mesh_of(1), spec(), Members(2, 0, f"{name}-next", 0.3))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_members_agree_wait_and_wake_across_processes(count):
    with processes(count, run_agreements, 300, first=1) as (name, peers):
        group = Member(name, count).group
        for i in range(300):
            assert group.agree([i]) == [(i,), *((i, member) for member in range(1, count))]
        timer = threading.Timer(0.2, group.wake)
        timer.start()
        group.wait()
        timer.join()
        assert group.agree([-1], timeout=20.0) == [(-1,)] + (count - 1) * [()]
        for peer in peers:
            assert peer.read_until("done|error")[0] == "done", peer.lines
            peer.process.wait(20)
        with pytest.raises(RuntimeError, match=r"member 1 .* has (left|died)"):
            group.agree([1])
        runtime.shutdown()


@pytest.mark.slow
def test_settings_that_differ_are_refused():
    with processes(1, run, 0, tidies_up=False, num_members=2, timeout=1.0) as (name, (other,)):
        wanted = dict(hidden_size=HIDDEN, top_k=TOP_K, normal_tokens=TOKENS,
                      low_latency_tokens=TOKENS)  # fmt: skip
        with pytest.raises(RuntimeError, match=r"settings differ: .*timeout=1.0.*timeout=2.0"):
            runtime.bootstrap(mesh_of(1), spec(timeout=2.0, **wanted), Members(2, 1, name, 20.0))
        other.process.kill()
        other.process.wait()


def test_ranks_that_nobody_has_cost_no_wait():
    """The programs are for 4 ranks, of which 3 are there; counting begins anew each time."""
    member = Member(devices=3, max_ep_size=4)
    for _ in range(3):
        assert member.group.active_ranks == (0, 1, 2)
        for seed in range(20):
            member.step(seed, "normal", (0, 1, 2))
            member.step(seed, "low_latency", (0, 1, 2))
        member.group.set_active((0, 1))
        assert member.group.active_ranks == (0, 1)
        member.group.set_active((0, 1, 2))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_active_ranks_change_between_steps_of_the_same_program(num_ranks):
    member = Member(devices=num_ranks)
    memberships = draw_memberships(num_ranks, 40, seed=num_ranks)
    for program in member.programs.values():
        jax.block_until_ready(program(*member.case(0, range(num_ranks))))
    before, compilations = member.group.counters(), CompilationCounter()
    run_memberships(member, memberships, num_steps=4)
    assert compilations.count == 0
    # Of a rank that is not active nothing begins and nothing ends.
    after = member.group.counters()
    for count in ("starts", "finishes"):
        assert after[count] - before[count] == 2 * 4 * sum(map(len, memberships))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(2, 1), (3, 2), (4, 1)])
def test_active_ranks_change_in_several_processes(count, devices):
    """Whole members are without an active rank at times, and come back."""
    memberships = draw_memberships(count * devices, 40, seed=count)
    assert any(not set(active) & set(range(devices)) for active in memberships)
    with processes(count, run_memberships, memberships, 5, devices=devices) as (_, members):
        for member in members:
            assert member.read_until("done|error")[0] == "done", member.lines


@pytest.mark.slow
def test_who_stays_may_change_the_active_ranks_before_who_leaves_has_gone():
    memberships = 300 * [[0, 1], [1]]
    with processes(2, run_memberships, [*memberships, [0, 1]], 0) as (_, members):
        for member in members:
            assert member.read_until("done|error")[0] == "done", member.lines


@pytest.mark.slow
def test_nobody_waits_for_inactive_members_or_minds_their_end():
    memberships = [[0, 1, 2], [0], [0, 2], [0], [0, 1, 2]]
    with processes(3, run_memberships, memberships, 5, first=1) as (name, (first, second)):
        member, rng = Member(name, 3), np.random.default_rng(0)
        run_memberships(member, memberships[:2], 5, rng)
        for peer in (first, second):
            peer.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        for seed in range(20):
            member.step(seed, "normal", [0])
        assert time.monotonic() - begun < 1
        for peer in (first, second):
            peer.process.send_signal(signal.SIGCONT)
        run_memberships(member, memberships[2:4], 5, rng)
        first.process.kill()
        first.process.wait()
        for seed in range(20):
            member.step(seed, "low_latency", [0])
        died = rf"rank 1 cannot be active: member 1 .process {first.process.pid}, rank 1. has died"
        with pytest.raises(RuntimeError, match=died):
            member.group.set_active([0, 1, 2])
        member.step(0, "normal", [0])
        runtime.shutdown()
        assert "no active member is left: member 0" in second.read_until("done|error").string


@pytest.mark.slow
def test_members_that_ask_for_different_active_ranks_all_hear_of_it():
    with processes(2, run_memberships, [[0, 1], [1]], 1, first=1) as (name, (peer,)):
        member, rng = Member(name, 2), np.random.default_rng(0)
        run_memberships(member, [[0, 1]], 1, rng)
        differ = "disagree on who is active: member 0 asks for ranks 0, member 1 for ranks 1"
        with pytest.raises(RuntimeError, match=differ):
            member.group.set_active([0])
        assert differ in peer.read_until("done|error").string
        assert member.group.active_ranks == (0, 1)
        runtime.shutdown()


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([], "there must be an active rank"),
        ([0, 3], "rank 3 cannot be active: no member has it"),
        ([0, 4], "rank 4 cannot be active: no member has it"),
        ([-1], "rank -1 cannot be active: no member has it"),
    ],
)
def test_ranks_that_cannot_be_active_are_refused(ranks, reason):
    member = Member(devices=3, max_ep_size=4)
    with pytest.raises(RuntimeError, match=f"^{reason}"):
        member.group.set_active(ranks)
    assert member.group.active_ranks == (0, 1, 2)
    member.step(1, "normal", (0, 1, 2))


def test_active_ranks_stay_while_an_exchange_is_under_way():
    member = Member(devices=2)
    x, idx, weights = member.case(1, range(2))
    dispatcher = ep.NORMAL["loopback"](axis_name="ep", slots_per_rank=2)

    def on_rank(x, idx, weights):
        return dispatcher.dispatch_start(x[0], idx[0], weights[0]).token

    start = jax.shard_map(
        on_rank, mesh=member.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
    )
    jax.block_until_ready(start(x, idx, weights))
    with pytest.raises(RuntimeError, match="cannot change while an exchange is under way"):
        member.group.set_active([0])
    member.group.recover()
    member.group.set_active([0])
    member.step(2, "normal", [0])


def test_active_ranks_stay_until_a_failure_is_mended():
    member = Member(devices=3)
    member.group.set_active([0, 1])
    x, idx, weights = member.case(1, range(2))
    idx[0, 0, 0] = 4
    with pytest.raises(jax.errors.JaxRuntimeError, match="of rank 2, which is not active"):
        jax.block_until_ready(member.programs["normal"](x, idx, weights))
    with pytest.raises(RuntimeError, match="until all have recovered: rank 0: token 0 is for"):
        member.group.set_active([0, 1, 2])
    member.group.recover()
    assert member.group.active_ranks == (0, 1)
    member.group.set_active([0, 1, 2])
    for seed in range(5):
        member.step(seed, "low_latency")


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_a_token_of_an_inactive_rank_is_an_error_of_that_rank(mode):
    member = Member(devices=3)
    member.group.set_active([0, 1])
    x, idx, weights = member.case(1, range(2))
    idx[2, 5, 1] = 3
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="rank 2: token 5 is for physical expert 3 of rank 1, but its own rank is not active",
    ):
        jax.block_until_ready(member.programs[mode](x, idx, weights))
    assert member.group.failure is None  # the others have nothing to mend
    member.step(2, mode, [0, 1])


def test_a_failed_exchange_ends_all_ranks_and_they_recover():
    member = Member(devices=4)
    member.step(0, "normal")
    x, idx, weights = member.case(1, range(4))
    idx[2, 3, 0] = 99
    with pytest.raises(jax.errors.JaxRuntimeError, match="physical expert 99 of rank 49"):
        jax.block_until_ready(member.programs["normal"](x, idx, weights))
    assert "rank 2: token 3 is for physical expert 99" in member.group.failure
    with pytest.raises(jax.errors.JaxRuntimeError, match="token 3 is for physical expert 99"):
        member.step(2, "low_latency")
    member.group.recover()
    assert member.group.failure is None
    for seed in range(10):
        member.step(seed, "low_latency")


def test_a_token_for_an_inactive_rank_is_an_error():
    member = Member(devices=2, max_ep_size=3)
    x, idx, weights = (a[:2] for a in member.case(1, range(2)))
    idx[0, 0, 0] = 4
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 2, which is not active"):
        jax.block_until_ready(member.programs["low_latency"](x, idx, weights))


def test_there_is_one_group_at_a_time():
    group = runtime.bootstrap(mesh_of(2), spec())
    assert runtime.bootstrap(mesh_of(2), spec()) is group is runtime.current()
    with pytest.raises(RuntimeError, match=r"call custom_calls.runtime.shutdown\(\) before"):
        runtime.bootstrap(mesh_of(2), spec(top_k=1))
    runtime.shutdown()
    with pytest.raises(RuntimeError, match="has left the expert-parallel group"):
        group.agree([])
    with pytest.raises(RuntimeError, match="there is no expert-parallel group"):
        runtime.current()
    assert runtime.bootstrap(mesh_of(2), spec(top_k=1)) is not group


def test_too_many_tokens_for_the_group_are_refused():
    member = Member(devices=2)
    dispatcher = ep.NORMAL["loopback"](axis_name="ep", slots_per_rank=2)
    many = 8 * TOKENS
    x = np.zeros((2, many, HIDDEN), np.float32)
    idx = np.zeros((2, many, TOP_K), np.int32)

    def on_rank(x, idx, weights):
        in_flight = dispatcher.dispatch_start(x[0], idx[0], weights[0])
        return dispatcher.dispatch_finish(in_flight).tokens.x[None]

    spec = jax.sharding.PartitionSpec("ep")
    with pytest.raises(jax.errors.JaxRuntimeError, match="bootstrap it for more tokens"):
        jax.block_until_ready(
            jax.shard_map(
                on_rank, mesh=member.mesh, in_specs=spec, out_specs=spec, check_vma=False
            )(x, idx, np.zeros(idx.shape, np.float32))
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_ep_size": 0}, "max_ep_size must be positive, got 0"),
        ({"normal_tokens": -1}, "normal_tokens must not be negative, got -1"),
        ({"timeout": 0.0}, r"timeout must be positive, got 0\.0"),
        ({"normal_tokens": 2**30}, "rows is too large"),
    ],
)
def test_sizes_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        spec(**fields)


def test_members_and_links_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"member \(2\) must be between 0 and num_members - 1"):
        Members(2, 2, "name")
    with pytest.raises(ValueError, match="needs a name"):
        Members(2, 1)
    with pytest.raises(ValueError, match="bandwidth must be positive, got 0"):
        Link(bandwidth=0.0)
    with pytest.raises(ValueError, match="are 2 ranks, max_ep_size is 1"):
        runtime.bootstrap(mesh_of(2), spec(max_ep_size=1))


def test_memory_is_what_the_spec_says():
    small = spec(max_ep_size=4, normal_tokens=8, low_latency_tokens=4)
    row = 8 * 4
    assert small.window_bytes == max(256 + 8 * (row + 16), 8 * 4 * row, 4 * 2 * row)
    assert small.bytes_per_rank == 2 * small.window_bytes
    assert spec(num_micro_batches=2).bytes_per_rank == 4 * spec().window_bytes


def test_a_modelled_link_takes_its_time():
    """A latency is seen by every exchange, on top of what it takes without."""
    member = Member(devices=2)
    runtime.shutdown()
    latency = 0.02
    group = runtime.bootstrap(
        member.mesh, runtime.EpSpec(**vars(member.group.spec) | {"link": Link(latency=latency)})
    )
    member.step(0, "normal")
    begun = time.monotonic()
    for seed in range(5):
        member.step(seed, "low_latency")
    assert time.monotonic() - begun > 5 * 2 * latency
    assert group.counters()["waited"] > 0


def test_what_is_hidden_behind_other_work_is_counted():
    """Between a start and its finish a program may do what it likes: only the rest is awaited."""
    latency, mesh = 0.1, mesh_of(2)
    group = runtime.bootstrap(mesh, spec(link=Link(latency=latency)))
    dispatcher = ep.NORMAL["loopback"](axis_name="ep", slots_per_rank=2)
    structure = []

    def start(x, idx, weights):
        leaves, tree = jax.tree.flatten(dispatcher.dispatch_start(x, idx, weights))
        structure[:] = [tree]
        return leaves

    def finish(leaves):
        return dispatcher.dispatch_finish(jax.tree.unflatten(structure[0], leaves)).tokens.x

    start, finish = (
        jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
        for f in (start, finish)
    )
    x, weights = np.ones((8, 8), np.float32), np.ones((8, 2), np.float32)
    idx = np.tile(np.asarray([[0, 2]], np.int32), (8, 1))

    def exchange(pause):
        before = group.counters()
        under_way = jax.block_until_ready(start(x, idx, weights))
        time.sleep(pause)
        jax.block_until_ready(finish(under_way))
        after = group.counters()
        return [after[name] - before[name] for name in ("under_way_seconds", "awaited_seconds")]

    exchange(0.0)  # compiles
    under_way, awaited = exchange(0.0)
    assert 0.5 * under_way < awaited <= under_way and under_way >= 2 * latency
    under_way, awaited = exchange(2 * latency)
    assert awaited == 0 and under_way >= 2 * latency
