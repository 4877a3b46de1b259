"""A model whose experts move to random slots and back, on some ranks of a group.

As a program, a member of a group of several processes: `python -m tests.jaxmoe.eplb.relocation
JSON` with the arguments of `relocate`. It prints "done" or "error: ...".
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from custom_calls import runtime
from jaxmoe import sharding
from jaxmoe.checkpoint import load_model
from jaxmoe.compilations import CompilationCounter
from jaxmoe.eplb.placement import make_placement
from jaxmoe.eplb.relocate import Relocator, plan_move, relocation_plan
from jaxmoe.plan import make_plans
from jaxmoe.step import join_ep_group


ROWS = 37  # no divisor of anything


def draw_slots(num_slots, num_experts, rng):
    """Any slots that hold every expert, replicas of one on one rank included."""
    more = rng.integers(0, num_experts, num_slots - num_experts)
    return rng.permutation(np.concatenate([np.arange(num_experts), more]))


def relocate(
    directory, devices, num_members=1, member=0, name="", backend="loopback", num_slots=16,
    moves=4, quantization=None, dtype="float32",
):  # fmt: skip
    """Move to random slots and compare each slot's weights with its expert's, number by number."""
    jax.config.update("jax_num_cpu_devices", max(devices, jax.config.jax_num_cpu_devices))
    ranks = sharding.EpRanks(num_members * devices, first=member * devices)
    how = dict(dtype=jnp.dtype(dtype), quantization=quantization)
    model = load_model(
        directory, sharding.make_mesh(devices), ranks=ranks, num_slots=num_slots, **how
    )
    whole = load_model(directory, sharding.make_mesh(1), **how)  # slot and expert are the same
    plans = make_plans(
        "auto", ep_size=ranks.ep_size, slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=8, moe_a2a_backend=backend, quantization=quantization,
    )  # fmt: skip
    plan = relocation_plan(plans[0])
    join_ep_group(
        model, [*plans, plan], max_tokens=ROWS, members=runtime.Members(num_members, member, name)
    )
    try:
        relocator = Relocator(model, plan, rows_at_a_time=ROWS)
        compilations = CompilationCounter()
        rng = np.random.default_rng(0)
        num_experts, num_layers = model.config.n_routed_experts, model.config.num_moe_layers
        first = ranks.first * model.slots_per_rank
        mine = slice(first, first + devices * model.slots_per_rank)
        old = np.asarray(model.placement.physical_to_logical)
        truth = [relocator.weights(whole.params, layer) for layer in range(num_layers)]
        params, warm = model.params, None
        for _ in range(moves):
            new = np.stack([draw_slots(num_slots, num_experts, rng) for _ in range(num_layers)])
            make_placement(new, num_experts)  # a legal one
            for layer in range(num_layers):
                before = [np.asarray(x) for x in relocator.weights(params, layer)]
                move = plan_move(old[layer], new[layer], model.slots_per_rank)
                for index in range(relocator.num_fetches(move)):
                    relocator.fetch(params, layer, move, index)
                arrays = relocator.finish(params, layer, move)
                for x, y in zip(relocator.weights(params, layer), before, strict=True):
                    np.testing.assert_array_equal(np.asarray(x), y)  # until it is replaced
                params = relocator.replace(params, {layer: arrays})
                for found, known in zip(arrays, truth[layer], strict=True):
                    expected = np.asarray(known)[new[layer][mine]]
                    np.testing.assert_array_equal(np.asarray(found), expected)
                if warm is None:
                    warm = compilations.count
            old = new
        assert compilations.count == warm
    finally:
        if num_members == 1:
            runtime.shutdown()


def main():
    try:
        relocate(**json.loads(sys.argv[1]))
        print("done", flush=True)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main()
