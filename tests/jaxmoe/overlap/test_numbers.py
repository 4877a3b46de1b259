"""That overlap changes no number: whole steps against the sequential order, bit for bit."""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_calls import runtime
from jaxmoe import batch as batches
from jaxmoe import kv_cache, sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.overlap.schedule import Overlap
from jaxmoe.step import join_ep_group
from tests.jaxmoe.overlap.steps import (
    DECODE_ROWS,
    NUM_PAGES,
    PAGE_SIZE,
    PREFILL_TOKENS,
    draw_lengths,
    make_steps,
    run,
)
from tests.processes import group_name, members


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("overlap") / "tiny"
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"], seed=0, dtype="float32")
    return directory


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, sharding.make_mesh(2), dtype=jnp.float32)


LENGTHS = {
    "one sequence in both halves": ((22,), (13,)),
    "several": ((5, 1, 9, 3), (2, 2)),
    "an idle rank": ((), (4, 17)),
    "one token": ((1,), ()),
    "nothing": ((), ()),
}


HOW = {
    "two_batch": dict(two_batch_overlap=True),
    "two_batch_staggered": dict(two_batch_overlap=True, tbo_decode_schedule="staggered"),
    "single_batch": dict(single_batch_overlap=True),
    "two_batch_in_parts": dict(two_batch_overlap=True, bound=2),
}


@pytest.fixture
def group():
    yield
    runtime.shutdown()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("backend", ["reference", "loopback"])
def test_overlap_changes_no_number(model, backend, how, group):
    sequential = make_steps(model, "reference", how.get("bound", 128))
    overlapped = make_steps(model, backend, **how)
    join_ep_group(model, overlapped.plans, max_tokens=PREFILL_TOKENS)
    for lengths in LENGTHS.values():
        expected, found = run(model, sequential, lengths), run(model, overlapped, lengths)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert overlapped.plans[0].overlap is not Overlap.NONE


@pytest.fixture(scope="module")
def sequential_results(directory, tmp_path_factory):
    """What four ranks of one process give in sequence, with XLA's all-to-all; in a file."""
    model = load_model(directory, sharding.make_mesh(4), dtype=jnp.float32)
    steps = make_steps(model, "reference")
    cases = [draw_lengths(4, seed) for seed in range(12)]
    cases += [[[9], [], [], []], [[], [], [3, 4], [22]], [[], [], [], []]]
    # Of two members, one is idle, and of four two or three; the other one's halves have work.
    assert any(not case[0] + case[1] and len(case[2]) > 1 for case in cases)
    found = {"num_cases": np.asarray(len(cases))}
    for index, lengths in enumerate(cases):
        found[f"{index}"] = np.asarray(json.dumps(lengths))
        results = run(model, steps, lengths)
        found |= {f"{index}-{i}": result for i, result in enumerate(results)}
    path = tmp_path_factory.mktemp("sequential") / "results.npz"
    np.savez(path, **found)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("num_members", [2, 4])
def test_overlap_changes_no_number_in_several_processes(directory, sequential_results, num_members):
    name = group_name()

    def told(member):
        return {
            "directory": str(directory), "num_members": num_members, "member": member,
            "name": name, "devices": 4 // num_members, "results": str(sequential_results),
        }  # fmt: skip

    which = range(num_members)
    with members("tests.jaxmoe.overlap.steps", told, which, name=name) as processes:
        for process in processes:
            assert process.read_until("done|error")[0] == "done", process.lines


def calls_of(model, steps, arrays):
    """The loopback calls of a compiled step, in the order in which they run."""
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    text = steps.trace_forward(cache, arrays).lower().compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :]
    calls = []
    for line in entry.splitlines():
        if match := re.search(r'custom_call_target="jaxmoe_(\w+)"', line):
            name = match[1].removeprefix("loopback_")
            channel = re.search(r"channel = (\d+)", line)
            if "grouped_gemm" in name:
                calls.append("gemm")
            elif channel:
                kind = "C" if "combine" in name else "D"
                calls.append(f"{kind}{'+' if 'start' in name else '-'}{int(channel[1]) // 2}")
    return calls


@pytest.mark.parametrize("phase", ["prefill", "decode", "staggered decode"])
def test_the_compiled_order_is_the_schedule_s(model, phase, group):
    how = dict(tbo_decode_schedule="staggered") if "staggered" in phase else {}
    steps = make_steps(model, "loopback", two_batch_overlap=True, **how)
    join_ep_group(model, steps.plans, max_tokens=PREFILL_TOKENS)
    prefill = batches.empty_prefill(2, PREFILL_TOKENS, NUM_PAGES)
    arrays = prefill if phase == "prefill" else batches.empty_decode(2, DECODE_ROWS, 4)
    layer = {
        "prefill": "D+0 D+1 D-0 gemm gemm C+0 D-1 gemm gemm C+1 C-0",
        "decode": "D+0 D+1 D-0 gemm gemm C+0 D-1 gemm gemm C+1 C-0",
        "staggered decode": "D+0 D-0 gemm gemm C+0 C-0 D+1",
    }[phase]
    calls = " ".join(calls_of(model, steps, arrays))
    assert calls.startswith(layer), calls
    # Every exchange ends, and between a start and its finish the other micro-batch works.
    starts = [call for call in calls.split() if "+" in call]
    assert sorted(starts) == sorted(c.replace("-", "+") for c in calls.split() if "-" in c)
    assert len(starts) == 2 * 2 * model.config.num_moe_layers


def test_one_token_is_not_cut(model):
    plan = make_steps(model, "reference", two_batch_overlap=True, single_batch_overlap=True).plans[
        0
    ]
    assert plan.overlap_of(1) is Overlap.SINGLE_BATCH and plan.unsplit.overlap_of(
        9
    ) is plan.overlap_of(1)
    assert plan.overlap_of(2) is Overlap.TWO_BATCH_IN_TURNS


def test_halves_have_all_tokens_in_order():
    decode = batches.empty_decode(1, 5, 4)
    decode.token_ids[0] = np.arange(5)
    halves = batches.split(batches.of_rank(decode), 2)
    assert [half.token_ids.tolist() for half in halves] == [[0, 1], [2, 3, 4]]
    assert [half.page_table.shape for half in halves] == [(2, 4), (3, 4)]
    prefill = batches.of_rank(batches.empty_prefill(1, 6, 4))
    for before, after in itertools.pairwise(batches.split(prefill, 3)):
        assert before.page_ids is after.page_ids
        assert before.request.shape == after.request.shape == (2,)
