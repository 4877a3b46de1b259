"""What a step counts: its tokens' choices, those and no others."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import batch as batches
from jaxmoe import kv_cache, sharding
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_model, write_random_checkpoint
from jaxmoe.eplb.load import add_load, empty_load
from jaxmoe.plan import make_plans
from jaxmoe.step import Steps


def test_choices_are_counted_by_layer_and_slot():
    rng = np.random.default_rng(0)
    chosen = rng.integers(-1, 7, (3, 50, 4)).astype(np.int32)
    before = rng.integers(0, 100, (3, 7)).astype(np.int32)
    counts = add_load(jnp.asarray(before), list(jnp.asarray(chosen)))
    expected = [np.bincount(layer[layer >= 0], minlength=7) for layer in chosen]
    np.testing.assert_array_equal(counts, before + expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("is_split", [False, True])
def test_counts_are_tokens_times_top_k_on_any_number_of_ranks(tmp_path, num_ranks, is_split):
    write_random_checkpoint(tmp_path / "model", RANDOM_CONFIGS["tiny"], seed=0, dtype="float32")
    model = load_model(
        tmp_path / "model", sharding.make_mesh(num_ranks), dtype=jnp.float32, num_slots=16
    )
    config = model.config
    prefill, decode = make_plans(
        "auto",
        ep_size=num_ranks,
        slots_per_rank=model.slots_per_rank,
        max_dispatch_tokens_per_rank=3,
        two_batch_overlap=True,
    )
    steps = Steps(model, prefill=prefill, decode=decode)
    cache = kv_cache.allocate(config, model.mesh, num_pages=9, page_size=8, dtype=jnp.float32)
    load = empty_load(model.mesh, config.num_moe_layers, model.num_slots)
    total = np.zeros(num_ranks, np.int64)
    logical = np.zeros((config.num_moe_layers, config.n_routed_experts), np.int64)
    for empty in (batches.empty_prefill(num_ranks, 32, 8), batches.empty_decode(num_ranks, 8, 8)):
        arrays = batches.fill(empty, page_size=8, num_pages=9, vocab_size=config.vocab_size)
        for rank in range(num_ranks):  # a rank of its own number of tokens, one of none
            arrays.positions[rank, rank:] = -1
        total += (arrays.positions >= 0).sum(1)
        hidden, cache, load, topk_idx = steps.forward_with_load(
            cache, load, arrays, is_split=is_split
        )
        assert hidden.shape[:2] == arrays.token_ids.shape
        for layer, chosen in enumerate(map(np.asarray, topk_idx)):
            assert ((chosen >= 0).all(-1) == (arrays.positions >= 0)).all()
            logical[layer] += np.bincount(chosen[chosen >= 0], minlength=logical.shape[1])
    counts = np.asarray(load)
    np.testing.assert_array_equal(
        counts.sum(-1),
        np.broadcast_to(total[:, None], counts.shape[:2]) * config.num_experts_per_tok,
    )
    slots = np.asarray(model.placement.physical_to_logical)
    for layer in range(config.num_moe_layers):
        of_layer = np.bincount(slots[layer], counts[:, layer].sum(0), logical.shape[1])
        np.testing.assert_array_equal(of_layer, logical[layer])
