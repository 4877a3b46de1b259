"""Experts that move while a real loop serves: the same answers, nothing compiled, no hang."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from jaxmoe import sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, convert, load_model, write_random_checkpoint
from jaxmoe.config import ModelConfig
from jaxmoe.eplb.relocate import Relocator, relocation_plan
from jaxmoe.plan import make_plans
from serving.engine import Engine, EngineLimits
from serving.metrics import observe_rebalancer
from serving.peers import Alone
from serving.rebalancer import EplbOptions, Rebalancer, routed_share
from serving.request import SamplingParams


LIMITS = EngineLimits(max_running=4, chunk_tokens=32, context_length=96, page_size=8, num_pages=60)
ROWS = 48
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
OFTEN = EplbOptions(num_iterations=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("eplb") / "model"
    sizes = {"num_hidden_layers": 4, "n_routed_experts": 16}
    write_random_checkpoint(directory, RANDOM_CONFIGS["tiny"] | sizes, seed=2, dtype="float32")
    return directory


@pytest.fixture(scope="module")
def original(checkpoint):
    """The weights of every expert, [L] lists of arrays [E, ...]."""
    model = load_model(checkpoint, sharding.make_mesh(1), dtype=jnp.float32)
    return weights_of(model)


def weights_of(model):
    plan = plans_of(model)[0]
    relocator = Relocator(model, relocation_plan(plan), rows_at_a_time=ROWS)
    return [
        [np.asarray(array) for array in relocator.weights(model.params, layer)]
        for layer in range(model.config.num_moe_layers)
    ]


def plans_of(model):
    return make_plans(
        "auto", ep_size=model.mesh.size, slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine_at(checkpoint):
    """Of an EP size, warmed up, with one redundant slot a rank."""
    engines = {}

    def get(ep_size):
        if ep_size not in engines:
            model = load_model(
                checkpoint, sharding.make_mesh(ep_size), dtype=jnp.float32, num_slots=16 + ep_size
            )
            prefill, decode = plans_of(model)
            engines[ep_size] = Engine(model, LIMITS, prefill=prefill, decode=decode)
            engines[ep_size].warmup(Alone())
        return engines[ep_size]

    return get


def make_rebalancer(engine, options):
    relocator = Relocator(
        engine.model, relocation_plan(plans_of(engine.model)[0]), rows_at_a_time=ROWS
    )
    rebalancer = Rebalancer(engine, relocator, Alone(), options)
    rebalancer.warmup()
    return rebalancer


@pytest.fixture
def any_gain_pays(monkeypatch):
    """The small model's steps are over sooner than its weights are moved."""
    monkeypatch.setattr("serving.rebalancer.routed_share", lambda config: 1e6)


@pytest.fixture
def serve(new_client, running):
    """`serve(engine, rebalancer)`: `running` such a loop."""

    def run(engine, rebalancer=None):
        peers = Alone() if rebalancer is None else rebalancer.peers
        return running(new_client(peers, engine, rebalancer=rebalancer))

    return run


def make_prompts(count, seed=0):
    """Of few different tokens: they meet few experts."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 20, n).tolist() for n in rng.integers(1, 50, count)]


def tokens_of(client, prompts):
    return [answer.token_ids for answer in client.run(prompts, [GREEDY] * len(prompts))]


def await_counts(rebalancer, timeout=60, **least):
    deadline = time.monotonic() + timeout
    while any(rebalancer.counts[name] < count for name, count in least.items()):
        assert time.monotonic() < deadline, rebalancer.counts
        time.sleep(0.01)


def assert_slots_hold_their_experts(engine, original):
    placement = np.asarray(engine.model.placement.physical_to_logical)
    for layer, arrays in enumerate(weights_of(engine.model)):
        for array, of_expert in zip(arrays, original[layer], strict=True):
            np.testing.assert_array_equal(array, of_expert[placement[layer]])


@pytest.mark.parametrize(
    ("ep_size", "layers_per_chunk"), [(2, None), (4, 1), (4, 2), (4, None), (8, 2)]
)
def test_answers_are_the_same_before_during_and_after(
    ep_size, layers_per_chunk, engine_at, original, serve, any_gain_pays
):
    engine = engine_at(ep_size)
    prompts = make_prompts(2 * ep_size)
    with serve(engine) as client:
        expected = tokens_of(client, prompts)
    options = dataclasses.replace(OFTEN, layers_per_chunk=layers_per_chunk)
    rebalancer = make_rebalancer(engine, options)
    with serve(engine, rebalancer) as client:
        for _ in range(10):
            assert tokens_of(client, prompts) == expected
            if rebalancer.counts["rebalances"] >= 2:
                break
        await_counts(rebalancer, rebalances=2)
        assert tokens_of(client, prompts) == expected
    counts = rebalancer.counts
    assert counts["abandoned"] == 0 and counts["moved_slots"] > 0
    expert_bytes = 3 * 64 * 32 * 4
    assert counts["moved_bytes"] == counts["moved_slots"] * expert_bytes
    assert 0 < rebalancer.longest_pause < counts["seconds"] + 1
    assert 0 < rebalancer.balancedness <= 1
    assert_slots_hold_their_experts(engine, original)


def test_what_ranks_get_becomes_more_even(engine_at, serve, any_gain_pays):
    """The balancedness of what was served, on the slots before and on those after."""
    engine = engine_at(4)
    rebalancer = make_rebalancer(engine, OFTEN)
    prompts = make_prompts(8, seed=3)
    found = []
    with serve(engine, rebalancer) as client:
        for _ in range(8):
            before = engine.load.read()
            tokens_of(client, prompts)
            found.append((engine.load.read() - before).of_rank)
    share = [(of_rank.mean(-1) / of_rank.max(-1)).mean() for of_rank in found]
    assert max(share[-3:]) > share[0]
    for of_rank in found:  # tokens x top-k, whatever the number of ranks
        assert len(set(of_rank.sum(-1).tolist())) == 1


def test_a_balanced_load_is_left_alone(engine_at, serve):
    engine = engine_at(4)
    slots = engine.model.placement.physical_to_logical
    rebalancer = make_rebalancer(engine, EplbOptions(num_iterations=6, min_utilization=0.01))
    with serve(engine, rebalancer) as client:
        tokens_of(client, make_prompts(4))
    assert rebalancer.counts["skipped"] > 0 == rebalancer.counts["rebalances"]
    assert engine.model.placement.physical_to_logical is slots


def test_what_costs_more_than_it_saves_is_left_alone(engine_at, serve, monkeypatch):
    monkeypatch.setattr("serving.rebalancer.routed_share", lambda config: 1e-9)
    engine = engine_at(4)
    slots = engine.model.placement.physical_to_logical
    rebalancer = make_rebalancer(engine, OFTEN)
    with serve(engine, rebalancer) as client:
        tokens_of(client, make_prompts(4))
        await_counts(rebalancer, skipped=1)
    assert rebalancer.counts["rebalances"] == 0
    assert engine.model.placement.physical_to_logical is slots


def test_one_that_is_under_way_ends_when_there_is_nothing_to_serve(
    engine_at, serve, any_gain_pays, monkeypatch
):
    engine = engine_at(4)
    rebalancer = make_rebalancer(engine, EplbOptions(num_iterations=20, layers_per_chunk=1))
    may_plan = threading.Event()
    plan = rebalancer._plan

    def plan_when_idle(window):
        assert may_plan.wait(60)
        return plan(window)

    monkeypatch.setattr(rebalancer, "_plan", plan_when_idle)
    with serve(engine, rebalancer) as client:
        tokens_of(client, make_prompts(4))
        assert rebalancer.is_under_way and client.loop.num_running == 0
        may_plan.set()
        await_counts(rebalancer, rebalances=1)
        assert not rebalancer.is_under_way


@pytest.mark.parametrize("how", ["stalls", "fails"])
def test_a_plan_that_does_not_come_is_abandoned_and_the_next_one_works(
    how, engine_at, original, serve, any_gain_pays, monkeypatch
):
    engine = engine_at(4)
    prompts = make_prompts(4, seed=5)
    with serve(engine) as client:
        expected = tokens_of(client, prompts)
    rebalancer = make_rebalancer(engine, dataclasses.replace(OFTEN, deadline=0.3))
    released = threading.Event()
    plan = rebalancer._plan

    def no_plan(window):
        if how == "fails":
            raise RuntimeError("injected")
        released.wait(60)
        return plan(window)

    monkeypatch.setattr(rebalancer, "_plan", no_plan)
    with serve(engine, rebalancer) as client:
        assert tokens_of(client, prompts) == expected
        await_counts(rebalancer, timeout=10, abandoned=1)  # also when the loop is idle
        monkeypatch.setattr(rebalancer, "_plan", plan)
        rebalancer._options = OFTEN
        released.set()  # a plan that comes too late is not used
        for _ in range(10):
            assert tokens_of(client, prompts) == expected
            if rebalancer.counts["rebalances"]:
                break
        await_counts(rebalancer, rebalances=1)
    assert_slots_hold_their_experts(engine, original)


def test_a_move_that_fails_is_given_up_and_no_answer_is_lost(
    engine_at, original, serve, any_gain_pays, monkeypatch
):
    engine = engine_at(4)
    prompts = make_prompts(8, seed=6)
    with serve(engine) as client:
        expected = tokens_of(client, prompts)
    rebalancer = make_rebalancer(engine, dataclasses.replace(OFTEN, layers_per_chunk=1))
    fetch, calls = rebalancer._relocator.fetch, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("injected")
        fetch(*args)

    monkeypatch.setattr(rebalancer._relocator, "fetch", failing)
    with serve(engine, rebalancer) as client:
        for _ in range(12):
            assert tokens_of(client, prompts) == expected
            if rebalancer.counts["abandoned"] and rebalancer.counts["rebalances"]:
                break
        await_counts(rebalancer, abandoned=1, rebalances=1)
    assert_slots_hold_their_experts(engine, original)


def test_a_move_past_its_deadline_leaves_whole_layers(engine_at, original, serve, any_gain_pays):
    engine = engine_at(4)
    rebalancer = make_rebalancer(
        engine, EplbOptions(num_iterations=6, layers_per_chunk=1, deadline=60.0)
    )
    advance = rebalancer.advance

    def overdue():
        advance()
        if rebalancer.counts["moved_slots"]:
            rebalancer._deadline = 0.0

    rebalancer.advance = overdue
    with serve(engine, rebalancer) as client:
        for _ in range(10):
            tokens_of(client, make_prompts(8, seed=7))
            if rebalancer.counts["abandoned"]:
                break
    assert rebalancer.counts["abandoned"] > 0
    assert_slots_hold_their_experts(engine, original)


def test_members_plan_and_switch_alike(checkpoint, new_client, thread_group, shut_down,
                                       any_gain_pays):  # fmt: skip
    """Each counts its own tokens only; they plan on the sum."""
    clients, rebalancers = [], []
    for member, peers in enumerate(thread_group.members):
        devices = jax.devices()[4 * member : 4 * member + 4]
        model = load_model(
            checkpoint, sharding.make_mesh(4, devices), dtype=jnp.float32, num_slots=20
        )
        prefill, decode = plans_of(model)
        engine = Engine(model, LIMITS, prefill=prefill, decode=decode)
        relocator = Relocator(model, relocation_plan(prefill), rows_at_a_time=ROWS)
        rebalancers.append(Rebalancer(engine, relocator, peers, OFTEN))
        clients.append(new_client(peers, engine, rebalancer=rebalancers[-1]))
    for client in clients:
        client.loop.start()
    try:
        for seed in range(10):
            answers = clients[0].submit(make_prompts(6, seed), [GREEDY] * 6)
            answers += clients[1].submit(make_prompts(2, seed + 100), [GREEDY] * 2)
            for answer in answers:
                assert answer.wait().finish_reason == "length"
            if rebalancers[0].counts["rebalances"] >= 2:
                break
        for rebalancer in rebalancers:
            await_counts(rebalancer, rebalances=2)
    finally:
        shut_down([client.loop for client in clients])
    first, second = (
        np.asarray(client.engine.model.placement.physical_to_logical) for client in clients
    )
    np.testing.assert_array_equal(first, second)
    assert rebalancers[0].counts["moved_slots"] == rebalancers[1].counts["moved_slots"]


def test_metrics_show_what_it_does(engine_at):
    rebalancer = make_rebalancer(engine_at(2), OFTEN)
    registry = CollectorRegistry()
    observe_rebalancer(registry, rebalancer)
    rebalancer.counts["moved_bytes"] = 12
    assert registry.get_sample_value("jaxmoe_eplb_moved_bytes_total") == 12
    assert registry.get_sample_value("jaxmoe_eplb_balancedness") == 1
    assert registry.get_sample_value("jaxmoe_eplb_longest_pause_seconds") == 0


def test_the_share_of_routed_experts():
    """V3: 8 of 256 experts a token are 58 layers x 8 x 44M of its 37B parameters."""
    config = ModelConfig.from_hf(RANDOM_CONFIGS["tiny"] | {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129280, "n_group": 8, "topk_group": 4,
    })  # fmt: skip
    assert routed_share(config) == pytest.approx(58 * 8 * 3 * 7168 * 2048 / 37.5e9, rel=0.03)


def test_experts_start_where_they_are_said_to(checkpoint, original, tmp_path):
    """From both kinds of checkpoints."""
    rng = np.random.default_rng(0)
    slots = np.stack([np.append(rng.permutation(16), rng.integers(0, 16, 4)) for _ in range(3)])
    for directory in (checkpoint, convert(checkpoint, tmp_path / "orbax")):
        model = load_model(
            directory, sharding.make_mesh(4), dtype=jnp.float32, num_slots=20, slots=slots
        )
        np.testing.assert_array_equal(np.asarray(model.placement.physical_to_logical), slots)
        for layer, arrays in enumerate(weights_of(model)):
            for array, of_expert in zip(arrays, original[layer], strict=True):
                np.testing.assert_array_equal(array, of_expert[slots[layer]])
