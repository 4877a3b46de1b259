"""Whole steps of a small model and all that they give, on some ranks of a group.

As a program, a member of a group of several processes: `python -m tests.jaxmoe.overlap.steps JSON`
with the arguments of `compare`. It prints "done" or "error: ...".
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from custom_calls import runtime
from jaxmoe import batch as batches
from jaxmoe import kv_cache, sharding
from jaxmoe.checkpoint import load_model
from jaxmoe.plan import make_plans
from jaxmoe.step import Steps, join_ep_group


PAGE_SIZE, NUM_PAGES = 8, 8
PREFILL_TOKENS, DECODE_ROWS = 22, 5  # halves of different sizes in decode


def make_steps(model, backend, bound=128, **overlap):
    prefill, decode = make_plans(
        "auto", ep_size=model.ranks.ep_size, slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=bound, moe_a2a_backend=backend, **overlap,
    )  # fmt: skip
    return Steps(model, prefill=prefill, decode=decode)


def draw_lengths(num_ranks, seed):
    """Of prompts on each rank that fit into a step."""
    rng = np.random.default_rng(seed)
    lengths = []
    for _ in range(num_ranks):
        ends = np.sort(rng.integers(0, PREFILL_TOKENS + 1, rng.integers(0, DECODE_ROWS + 1)))
        lengths.append([int(n) for n in np.diff(ends, prepend=0) if n])
    return lengths


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


def run(model, steps, lengths):
    """A prefill of these prompts and a decode step: hidden states, activations, cache."""
    num_ranks = len(lengths)
    local = slice(model.ranks.first, model.ranks.first + model.mesh.size)
    prefill = batches.empty_prefill(num_ranks, PREFILL_TOKENS, NUM_PAGES)
    decode = batches.empty_decode(num_ranks, DECODE_ROWS, 4)
    fill(prefill, decode, lengths)
    prefill, decode = jax.tree.map(lambda x: x[local], (prefill, decode))
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    first, cache, activations = steps.forward_with_activations(cache, prefill)
    second, cache = steps.forward(cache, decode)
    return [np.asarray(x) for x in jax.tree.leaves((first, activations, second, cache.latent))]


def compare(directory, num_members, member, name, devices, results):
    """Run the steps of all cases in the file `results` in two batches, as this member, and compare
    bit by bit."""
    jax.config.update("jax_num_cpu_devices", devices)
    ranks = sharding.EpRanks(num_members * devices, first=member * devices)
    model = load_model(directory, sharding.make_mesh(devices), dtype=jnp.float32, ranks=ranks)
    steps = make_steps(model, "loopback", two_batch_overlap=True)
    group = join_ep_group(
        model, steps.plans, max_tokens=PREFILL_TOKENS,
        members=runtime.Members(num_members, member, name),
    )  # fmt: skip
    local = slice(ranks.first, ranks.first + devices)
    with np.load(results) as cases:
        num_cases = int(cases["num_cases"])
        for case in range(num_cases):
            lengths = json.loads(str(cases[f"{case}"]))
            for index, found in enumerate(run(model, steps, lengths)):
                expected = cases[f"{case}-{index}"][local]
                np.testing.assert_array_equal(found, expected, f"{lengths}, {index}")
    # Dispatch and combine of both halves of a prefill and of a decode step.
    starts = num_cases * model.config.num_moe_layers * devices * 2 * 2 * 2
    assert group.counters()["starts"] == starts
    assert all(run._cache_size() <= 1 for run in steps._forward.values())


def main():
    try:
        compare(**json.loads(sys.argv[1]))
        print("done", flush=True)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main()
