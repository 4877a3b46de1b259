import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import sharding
from jaxmoe.checkpoint import load_model
from jaxmoe.evaluation.expert_load import ExpertLoad, count_choices, max_over_mean
from jaxmoe.plan import make_plans
from jaxmoe.reference.compare import random_prompts
from jaxmoe.step import Steps


def test_the_choices_of_a_sequence_do_not_depend_on_the_others(model_dir):
    model = load_model(model_dir, sharding.make_mesh(2), dtype=jnp.float32)
    prefill, decode = make_plans(
        "auto",
        ep_size=2,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=128,
    )
    count = functools.partial(
        count_choices, model, Steps(model, prefill=prefill, decode=decode), max_tokens=100
    )
    lengths = (100, 65, 1, 63, 64)  # a rank idle, pages full and not, shorter after longer
    sequences = random_prompts(model.config, lengths)
    counts = count(sequences)
    num_chosen = sum(lengths) * model.config.num_experts_per_tok
    assert counts.sum(-1).tolist() == [num_chosen] * len(counts)
    np.testing.assert_array_equal(counts, sum(count([ids]) for ids in sequences))
    assert (count([sequences[0][:70]]) <= count(sequences[:1])).all()  # attention is causal
    assert not count([]).any()


def test_skew_and_overlap():
    even = np.full((2, 16), 10)
    first, second = even.copy(), even.copy()
    first[:, [0, 1]], second[:, [1, 2]] = 90, 90
    load = ExpertLoad({"a": first, "b": second}, {"a": 80, "b": 80})
    assert max_over_mean(even).tolist() == [1.0, 1.0]
    assert max_over_mean(first).tolist() == [4.5, 4.5]
    assert (load.num_top, load.overlap("a", "b"), load.overlap("a", "a")) == (2, 0.5, 1.0)
    found = load.to_dict()
    assert found["overlap"] == {"a/b": 0.5}
    assert found["overlap_by_chance"] == 0.125
    # Together expert 1 has 180 of 640, the others less.
    assert found["all"]["max_over_mean"] == pytest.approx([4.5, 4.5])
    assert "a, b" in load.format_table()


@pytest.mark.usefixtures("shared_engines")
def test_the_command_adds_the_table(run, model_dir, monkeypatch):
    monkeypatch.setattr("jaxmoe.evaluation.expert_load.ITEMS_PER_DOMAIN", 3)
    model = ("--model-path", model_dir, "--ep-size", "2", "--batch-size", "4")
    items = ("--set", "new_seeds", "--limit", "4", "--max-new-tokens", "24")
    _, out, _ = run(*model, *items, "--expert-load", "--json")
    domains = json.loads(out)["expert_load"]["domains"]
    assert list(domains) == ["problems", "stories", "drills"]
    for domain in domains.values():
        assert np.sum(domain["counts"]) == domain["num_tokens"] * 2  # one MoE layer, top 2
