"""The compiled step: what it contains, and that it updates the cache where it is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from custom_calls import runtime
from jaxmoe import batch, kv_cache, sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.compilations import CompilationCounter
from jaxmoe.plan import DispatchMode, ExecutionPlan, Quantization, make_plans, resolve_dtype
from jaxmoe.step import Steps, join_ep_group


NUM_PAGES, PAGE_SIZE = 64, 16
COLLECTIVES = r"all-to-all|all-reduce|all-gather|collective-permute|reduce-scatter"


def make_model(tmp_path_factory, name, quantization=None, **changes):
    directory = tmp_path_factory.mktemp("step") / name
    write_random_checkpoint(directory, RANDOM_CONFIGS[name] | changes, seed=0, dtype="float32")
    mesh = sharding.make_mesh(2)
    return load_model(directory, mesh, dtype=jnp.float32, quantization=quantization)


def make_steps(model, **changes):
    plans = make_plans(
        "auto",
        ep_size=model.ranks.ep_size,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
    )
    prefill, decode = (dataclasses.replace(plan, **changes) for plan in plans)
    return Steps(model, prefill=prefill, decode=decode)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory, "tiny")


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory):
    experts_alone = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    return make_model(tmp_path_factory, "fp8-small", Quantization.FP8, **experts_alone)


@pytest.fixture(scope="module")
def steps(model):
    return make_steps(model)


def compiled(model, steps, arrays):
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    return steps.trace_forward(cache, arrays).lower().compile(), cache


@pytest.mark.parametrize(
    "arrays", [batch.empty_prefill(2, 8, 8), batch.empty_decode(2, 4, 8)], ids=["prefill", "decode"]
)
def test_the_only_collective_is_all_to_all(model, steps, arrays):
    program, _ = compiled(model, steps, arrays)
    assert set(re.findall(COLLECTIVES, program.as_text())) == {"all-to-all"}
    assert "jaxmoe_cpu_grouped_gemm" in program.as_text()


@pytest.mark.parametrize(
    "arrays", [batch.empty_prefill(2, 8, 8), batch.empty_decode(2, 4, 8)], ids=["prefill", "decode"]
)
def test_fp8_adds_no_collective_and_keeps_its_weights(fp8_model, arrays):
    text = compiled(fp8_model, make_steps(fp8_model), arrays)[0].as_text()
    assert set(re.findall(COLLECTIVES, text)) == {"all-to-all"}
    assert re.search(r"f8e4m3fn\[8,256,192\]\S* parameter", text)


def prefill_and_decode(model, steps, on=slice(None)):
    """Hidden states of a prompt of 8 tokens on these ranks and of the token that follows it."""
    num_ranks = model.mesh.size
    arrays = batch.empty_prefill(num_ranks, 8, 1)
    arrays.token_ids[on] = np.arange(num_ranks * 8).reshape(-1, 8)[on]
    arrays.positions[on] = np.arange(8)
    arrays.slots[on] = PAGE_SIZE + np.arange(8)
    arrays.page_ids[on], arrays.num_pages[on], arrays.request[on] = 1, 1, 0
    arrays.page_request[on] = 0
    one = batch.empty_decode(num_ranks, 1, 1)
    one.token_ids[on], one.positions[on], one.slots[on], one.page_table[on] = 3, 8, PAGE_SIZE + 8, 1
    cache = kv_cache.allocate(
        model.config, model.mesh, num_pages=2, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    prefilled, cache = steps.forward(cache, arrays)
    decoded, _ = steps.forward(cache, one)
    assert np.isfinite(prefilled).all() and np.abs(prefilled).max() > 0.1
    return np.asarray(prefilled), np.asarray(decoded)


@pytest.mark.parametrize("name", ["model", "fp8_model"])
def test_row_alignment_changes_no_number(name, request):
    model = request.getfixturevalue(name)
    unaligned = prefill_and_decode(model, make_steps(model))
    aligned = prefill_and_decode(model, make_steps(model, row_alignment=128))
    jax.tree.map(np.testing.assert_array_equal, aligned, unaligned)


@pytest.mark.parametrize("name", ["model", "fp8_model"])
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_loopback_changes_no_number(name, mode, request):
    """Nor do FP8 tokens under way, and several dispatches one after the other."""
    model = request.getfixturevalue(name)
    how = dict(dispatch_mode=DispatchMode(mode), max_dispatch_tokens_per_rank=3)
    expected = prefill_and_decode(model, make_steps(model, **how))
    how |= dict(moe_a2a_backend="loopback", fp8_dispatch=model.quantization is not None)
    steps = make_steps(model, **how)
    try:
        group = join_ep_group(model, steps.plans, max_tokens=8)
        found = prefill_and_decode(model, steps)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        exchanges = model.config.num_moe_layers * 2 * (3 + 1)  # prefill in three parts
        assert group.counters()["starts"] == 2 * exchanges
    finally:
        runtime.shutdown()


def on_ranks(model, active):
    """The model's placement without the slots of other ranks."""
    of = jax.tree.map(np.asarray, model.placement)
    slots = of.physical_to_logical.shape[1] // model.ranks.ep_size
    table, replicas = np.full_like(of.logical_to_physical, -1), np.zeros_like(of.replicas)
    for layer, experts in enumerate(of.physical_to_logical):
        for slot, expert in enumerate(experts):
            if slot // slots in active:
                table[layer, expert, replicas[layer, expert]] = slot
                replicas[layer, expert] += 1
    assert replicas.all(), "an expert has no slot left"
    placement = dataclasses.replace(of, logical_to_physical=table, replicas=replicas)
    return jax.device_put(placement, sharding.replicated(model.mesh))


def test_ranks_leave_and_come_back_to_a_compiled_step(tmp_path_factory):
    """Two replicas of every expert; the answers do not depend on who computes them."""
    directory = tmp_path_factory.mktemp("step") / "tiny"
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"], seed=0, dtype="float32")
    model = load_model(directory, sharding.make_mesh(4), dtype=jnp.float32, num_slots=16)
    steps = make_steps(model, moe_a2a_backend="loopback")
    try:
        group = join_ep_group(model, steps.plans, max_tokens=8)
        expected = prefill_and_decode(model, steps)
        compilations = CompilationCounter()
        for active in ([0, 1], [0, 1, 2, 3], [0, 3], [1, 2, 3], [2, 3], [0, 1, 2, 3]):
            group.set_active(active)
            steps.model = dataclasses.replace(model, placement=on_ranks(model, active))
            found = prefill_and_decode(model, steps, on=active)
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours[active], theirs[active], rtol=1e-5, atol=1e-5)
        assert compilations.count == 0
        # A placement that keeps slots of a rank that has gone loses no token in silence.
        group.set_active([0, 1, 2])
        with pytest.raises(jax.errors.JaxRuntimeError, match="of rank 3, which is not active"):
            prefill_and_decode(model, steps, on=[0, 1, 2])
        group.recover()
        steps.model = dataclasses.replace(model, placement=on_ranks(model, [0, 1, 2]))
        prefill_and_decode(model, steps, on=[0, 1, 2])
    finally:
        runtime.shutdown()


def test_a_part_of_the_ranks_needs_a_group(model):
    part = dataclasses.replace(model, ranks=sharding.EpRanks(4, first=2))
    plan = ExecutionPlan(4, part.slots_per_rank, DispatchMode.NORMAL)
    with pytest.raises(ValueError, match="within one process, the model has 2 of 4 ranks"):
        Steps(part, prefill=plan, decode=plan)


@pytest.mark.parametrize(
    "arrays",
    [batch.empty_prefill(2, 8, 8), batch.empty_decode(2, 4, 8), batch.empty_decode(2, 1, 8)],
    ids=["prefill", "decode", "decode of one"],
)
def test_the_cache_is_updated_in_place(model, steps, arrays):
    """Memory besides arguments and results has no room for one layer's pool."""
    program, cache = compiled(model, steps, arrays)
    memory = program.memory_analysis()
    pool_bytes = cache.num_bytes // 2 // len(cache.latent)
    assert memory.alias_size_in_bytes >= cache.num_bytes // 2
    big = kv_cache.allocate(
        model.config, model.mesh, num_pages=16 * NUM_PAGES, page_size=PAGE_SIZE, dtype=jnp.float32
    )
    larger = steps.trace_forward(big, arrays).lower().compile().memory_analysis()
    assert larger.temp_size_in_bytes < memory.temp_size_in_bytes + pool_bytes
    jax.block_until_ready(cache)


def test_a_plan_for_another_mesh_is_refused(model):
    plan = ExecutionPlan(4, 2, DispatchMode.NORMAL)
    with pytest.raises(ValueError, match="the plan is for 4 ranks of 2 slots, the model is on 2"):
        Steps(model, prefill=plan, decode=plan)


def test_unknown_modes_and_dtypes_are_refused(model):
    with pytest.raises(ValueError, match=r"deepep_mode must be one of .* got 'fast'"):
        make_plans("fast", ep_size=1, slots_per_rank=1, max_dispatch_tokens_per_rank=1)
    with pytest.raises(ValueError, match=r"dtype must be one of .* got 'int8'"):
        resolve_dtype("int8", model.config)
    with pytest.raises(ValueError, match=r"moe_a2a_backend must be one of .* got 'nccl'"):
        ExecutionPlan(1, 1, DispatchMode.NORMAL, moe_a2a_backend="nccl")
    with pytest.raises(ValueError, match="max_dispatch_tokens_per_rank must be positive, got 0"):
        make_plans("low_latency", ep_size=1, slots_per_rank=1, max_dispatch_tokens_per_rank=0)
    assert resolve_dtype("auto", model.config) == jnp.float32


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(ValueError, match=r"between 1 and the number of devices \(8\), got 9"):
        sharding.make_mesh(9)
