"""That overlap changes no number: whole steps against the sequential order, bit for bit."""

import itertools
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
from jaxmoe.plan import make_plans
from jaxmoe.step import Steps, join_ep_group


PAGE_SIZE, NUM_PAGES = 8, 8
PREFILL_TOKENS, DECODE_ROWS = 22, 5  # halves of different sizes in decode


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("overlap") / "tiny"
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"], seed=0, dtype="float32")
    return load_model(directory, sharding.make_mesh(2), dtype=jnp.float32)


def make_steps(model, backend, bound=128, **overlap):
    prefill, decode = make_plans(
        "auto", ep_size=2, slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=bound, moe_a2a_backend=backend, **overlap,
    )  # fmt: skip
    return Steps(model, prefill=prefill, decode=decode)


def fill(prefill, decode, lengths):
    """Prompts of these lengths on each rank, and the token after each."""
    for rank, of_rank in enumerate(lengths):
        token = page = 0
        for i, length in enumerate(of_rank):
            span = slice(token, token + length)
            pages = 1 + page + np.arange(-(-(length + 1) // PAGE_SIZE))
            positions = np.arange(length)
            prefill.token_ids[rank, span] = (7 * token + 3 * rank + positions) % 256
            prefill.positions[rank, span] = positions
            prefill.request[rank, span] = i
            prefill.slots[rank, span] = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % 8
            read = slice(page, page + len(pages))
            prefill.page_ids[rank, read], prefill.page_request[rank, read] = pages, i
            prefill.page_start[rank, read] = np.arange(len(pages)) * PAGE_SIZE
            decode.token_ids[rank, i], decode.positions[rank, i] = 11 + i, length
            decode.slots[rank, i] = pages[length // PAGE_SIZE] * PAGE_SIZE + length % PAGE_SIZE
            decode.page_table[rank, i, : len(pages)] = pages
            token, page = token + length, page + len(pages)
        prefill.num_pages[rank] = page


LENGTHS = {
    "one sequence in both halves": ((22,), (13,)),
    "several": ((5, 1, 9, 3), (2, 2)),
    "an idle rank": ((), (4, 17)),
    "one token": ((1,), ()),
    "nothing": ((), ()),
}


def run(model, steps, lengths):
    prefill = batches.empty_prefill(2, PREFILL_TOKENS, NUM_PAGES)
    decode = batches.empty_decode(2, DECODE_ROWS, 4)
    fill(prefill, decode, lengths)
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    first, cache, activations = steps.forward_with_activations(cache, prefill)
    second, cache = steps.forward(cache, decode)
    return [np.asarray(x) for x in jax.tree.leaves((first, activations, second, cache.latent))]


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
    join_ep_group(model, overlapped._plans, max_tokens=PREFILL_TOKENS)
    for lengths in LENGTHS.values():
        expected, found = run(model, sequential, lengths), run(model, overlapped, lengths)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert overlapped._plans[0].overlap is not Overlap.NONE


def calls_of(model, steps, arrays):
    """The loopback calls of a compiled step, in the order in which they run."""
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    run = steps._forward[steps._plan(arrays), False]
    text = run.lower(model.params, cache, arrays, model.placement).compile().as_text()
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
    join_ep_group(model, steps._plans, max_tokens=PREFILL_TOKENS)
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
    plan = make_steps(model, "reference", two_batch_overlap=True, single_batch_overlap=True)._plans[
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
