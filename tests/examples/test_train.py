"""The training of the embedded model, on models small enough for a CPU."""

import dataclasses
import json
from functools import partial

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_tiny import export as exporting
from examples.train_tiny import model, plot, train
from examples.train_tiny.data import make_dataset
from examples.train_tiny.export import export, load_export
from jaxmoe import sharding
from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.checkpoint import RANDOM_CONFIGS, load_hf
from jaxmoe.checkpoint.quantize import quantize
from jaxmoe.config import ModelConfig
from jaxmoe.moe.router import route_v3
from jaxmoe.plan import make_plans
from jaxmoe.reference.compare import random_prompts
from jaxmoe.reference.torch_deepseek import load_reference, trace_reference
from jaxmoe.reference.trace_jax import trace_model
from jaxmoe.step import Steps
from jaxmoe.tokenizer import Tokenizer


CONFIG_JSON = {**RANDOM_CONFIGS["tiny"], "num_nextn_predict_layers": 1, "eos_token_id": 7}
CONFIG = ModelConfig.from_hf(CONFIG_JSON)
ROWS, LENGTH = 4, 32
LOSSES = dict(mtp_weight=0.3, balance_weight=1e-2, z_weight=1e-4)
PARITY = 1e-4


def packed(seed, lengths=(12, 20), rows=ROWS):
    """Rows of random documents of these lengths, as the data pipeline packs them."""
    generator = np.random.default_rng(seed)
    length = sum(lengths)
    segment_ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    ends = np.append(segment_ids[1:] != segment_ids[:-1], False)
    return {
        "tokens": generator.integers(2, 256, (rows, length + 1)).astype(np.int32),
        "loss_mask": np.tile(1 - ends.astype(np.float32), (rows, 1)),
        "segment_ids": np.tile(segment_ids, (rows, 1)),
        "positions": np.tile(positions, (rows, 1)),
    }


def as_batch(arrays):
    return jax.tree.map(jnp.asarray, train._to_batch(arrays))


def few_batches(num=3):
    """An endless stream of a few batches: what is learned of them is learned by heart."""
    return grain.MapDataset.source([packed(seed) for seed in range(num)]).repeat().to_iter_dataset()


def options(out, **changes):
    values = dict(
        out=out,
        batch_size=ROWS,
        sequence_length=LENGTH,
        warmup_steps=10,
        learning_rate=1e-2,
        weight_decay=0.01,
        dtype="float32",
        num_devices=1,
        num_workers=0,
        checkpoint_every=10**6,
    )
    return train.Options(**{**values, **changes})


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """Runs that differ in how long they go on share a compiled step."""
    steps, make_step = {}, train.make_step

    def get(config, chosen, mesh):
        losses = {name: getattr(chosen, name) for name in (*LOSSES, "dtype", "weight_decay")}
        key = (config, mesh, *losses.values())
        return steps.setdefault(key, make_step(config, chosen, mesh))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train, "make_step", get)
        yield


@pytest.fixture(scope="module")
def random_model():
    """Parameters and biases unlike those of an initialised model."""
    params = model.initialise(CONFIG, 0, has_mtp=True)
    generator = np.random.default_rng(1)
    params = {
        name: value * jnp.asarray(1 + 0.1 * generator.standard_normal(value.shape), jnp.float32)
        for name, value in params.items()
    }
    # Router scores well apart, so that rounding does not change a choice.
    params = {n: v * (20 if n.endswith("gate.weight") else 1) for n, v in params.items()}
    bias = 0.05 * generator.standard_normal((2, CONFIG.n_routed_experts))
    return params, jnp.asarray(bias, jnp.float32)


@pytest.fixture(scope="module")
def run_forward(random_model):
    run = jax.jit(partial(model.forward, *random_model, config=CONFIG, dtype=jnp.float32))
    return lambda arrays: run(as_batch(arrays))


# The configuration


def test_shipped_configuration():
    config_json = json.loads((train.HERE / "config.json").read_text())
    config = ModelConfig.from_hf(config_json)
    sizes = [
        sum(int(np.prod(shape)) for shape in model.parameter_shapes(config, has_mtp=mtp).values())
        for mtp in (False, True)
    ]
    assert sizes == [19_231_488, 22_870_272]
    assert config_json["num_nextn_predict_layers"] == 1


# The forward pass


@pytest.mark.parametrize(
    ("n_group", "topk_group", "top_k", "norm_topk_prob"),
    [(8, 4, 4, True), (8, 4, 4, False), (1, 1, 6, False), (4, 1, 2, True)],
)
def test_dense_routing_is_the_routers(n_group, topk_group, top_k, norm_topk_prob):
    config = dataclasses.replace(
        CONFIG,
        n_routed_experts=32,
        n_group=n_group,
        topk_group=topk_group,
        num_experts_per_tok=top_k,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=2.5,
    )
    generator = np.random.default_rng(0)
    # Few distinct values: many ties.
    logits = jnp.asarray(generator.integers(-3, 4, (200, 32)) / 2, jnp.float32)
    bias = jnp.asarray(generator.integers(-1, 2, 32) / 10, jnp.float32)
    options = ("n_group", "topk_group", "top_k", "norm_topk_prob")
    topk_idx, weights = jax.jit(route_v3, static_argnames=options)(
        logits,
        bias,
        n_group=n_group,
        topk_group=topk_group,
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
    )
    expected = np.zeros((200, 32), np.float32)
    np.put_along_axis(expected, np.asarray(topk_idx), np.asarray(weights) * 2.5, axis=1)
    route = jax.jit(model.route, static_argnames="config")
    found = np.asarray(route(jax.nn.sigmoid(logits), bias, config=config))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ((found > 0).sum(-1) == top_k).all()


def test_written_gradients_are_those_of_autodiff(random_model, monkeypatch):
    batch = as_batch(packed(0))
    loss = partial(model.loss, config=CONFIG, dtype=jnp.float32, **LOSSES)
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    found, _ = gradient(*random_model, batch)
    plain = dict(
        _attend=lambda *args: model._attend_forward(*args)[0],
        _cross_entropy=lambda *args: model._cross_entropy_forward(*args)[0],
        _embed=lambda weight, ids, dtype: weight[ids].astype(dtype),
    )
    for name, function in plain.items():
        monkeypatch.setattr(model, name, function)
    expected, _ = jax.jit(jax.grad(lambda *args: loss(*args), has_aux=True))(*random_model, batch)
    for name, value in expected.items():
        scale = np.abs(np.asarray(value)).max()
        assert scale > 0, name
        np.testing.assert_allclose(found[name], value, atol=2e-5 * scale, err_msg=name)


def test_documents_do_not_see_each_other(run_forward):
    arrays = packed(0)
    whole = run_forward(arrays)
    cut = 12
    other = {name: value.copy() for name, value in arrays.items()}
    other["tokens"][:, :cut] = packed(9)["tokens"][:, :cut]
    changed = run_forward(other)
    for name in ("hidden", "mtp_hidden"):
        before, after = (
            np.asarray(getattr(outputs, name)).reshape(ROWS, LENGTH, -1)
            for outputs in (whole, changed)
        )
        np.testing.assert_allclose(before[:, cut:], after[:, cut:], atol=1e-5)
        assert np.abs(before[:, :cut] - after[:, :cut]).max() > 0.1
    alone = {name: value[:, cut:] for name, value in arrays.items()}
    alone["segment_ids"] = np.ones_like(alone["segment_ids"])
    np.testing.assert_allclose(
        np.asarray(run_forward(alone).hidden).reshape(ROWS, LENGTH - cut, -1),
        np.asarray(whole.hidden).reshape(ROWS, LENGTH, -1)[:, cut:],
        atol=1e-5,
    )


def test_what_each_position_knows(run_forward):
    """Position t of the model has seen tokens up to t, of the MTP layer up to t + 1."""
    arrays = packed(0, lengths=(LENGTH,))
    at = 20
    other = {name: value.copy() for name, value in arrays.items()}
    other["tokens"][:, at] = (other["tokens"][:, at] + 1) % 256
    for name, first in (("hidden", at), ("mtp_hidden", at - 1)):
        before, after = (
            np.asarray(getattr(run_forward(a), name)).reshape(ROWS, LENGTH, -1)
            for a in (arrays, other)
        )
        changed = np.abs(before - after).max((0, 2)) > 1e-4
        assert not changed[:first].any() and changed[first:].all()


def test_mtp_targets():
    batch = model.PackedBatch(
        tokens=jnp.asarray([[10, 11, 12, 13, 14, 15, 16]], jnp.int32),
        weights=jnp.asarray([[0.1, 1, 0, 1, 1, 0.5]], jnp.float32),  # 12 ends a document
        positions=jnp.asarray([[0, 1, 2, 0, 1, 2]], jnp.int32),
        segment_ids=jnp.asarray([[1, 1, 1, 2, 2, 2]], jnp.int32),
    )
    targets, weights = model.mtp_targets(batch)
    np.testing.assert_array_equal(targets, [[12, 13, 14, 15, 16, 0]])
    # Of (10, 11) -> 12; (11, 12) would predict another document's 13, (12, 13) spans two.
    np.testing.assert_array_equal(weights, np.float32([[1, 0, 0, 1, 0.5, 0]]))


def test_padding_loads_no_expert(run_forward):
    arrays = packed(0)
    load = np.asarray(run_forward(arrays).expert_load)
    top_k = CONFIG.num_experts_per_tok
    np.testing.assert_array_equal(load.sum(-1), top_k * ROWS * LENGTH)
    arrays["segment_ids"][:, 12:] = 0
    load = np.asarray(run_forward(arrays).expert_load)
    np.testing.assert_array_equal(load.sum(-1), top_k * ROWS * 12)


# Training


def test_loss_falls_on_generated_text(tmp_path):
    """The shipped recipe, made small: real data, bfloat16, warm-up and decay."""
    config_json = {**CONFIG_JSON, "vocab_size": 4096, "routed_scaling_factor": 2.5}
    changes = dict(sequence_length=64, batch_size=8, dtype="bfloat16", schedule_steps=40)
    chosen = options(tmp_path / "run", **changes)
    dataset = make_dataset(EMBEDDED_MODEL, seed=0, batch_size=8, sequence_length=64, num_workers=0)
    train.train(dataset, config_json, chosen)
    lines = list(train.read_log(tmp_path / "run" / train.LOG_FILE))
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    first, last = lines[0], lines[-1]
    for name in ("loss", "mtp_loss"):
        assert last[name] < 0.75 * first[name] < 0.75 * 1.05 * np.log(4096)
    assert last["accuracy"] > 2 * first["accuracy"]
    assert last["learning_rate"] < 0.1 * chosen.learning_rate
    assert last["tokens"] == 40 * 8 * 64
    assert len(last["expert_load_max"]) == 2 and min(last["expert_load_max"]) >= 1
    assert last["tokens_per_s"] > 0 and last["data_wait_s"] >= 0


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    line = {"loss": 3.0, "mtp_loss": 4.0, "learning_rate": 1e-3, "expert_load_max": [1.5, 2.0]}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"step": n, "tokens": n, **line}) + "\n" for n in (1, 2, 1)))
    plot.plot(log, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    log.write_text("")
    with pytest.raises(ValueError, match="no lines"):
        plot.plot(log, tmp_path / "none.png")


def test_learns_by_heart_and_resumes_exactly(tmp_path):
    whole = train.train(few_batches(), CONFIG_JSON, options(tmp_path / "whole", steps=60))
    lines = list(train.read_log(tmp_path / "whole" / train.LOG_FILE))
    # Chance is log 256 = 5.5; nothing but the order of the tokens is there to learn.
    assert lines[0]["loss"] > 4.5 and lines[-1]["loss"] < 0.5 and lines[-1]["mtp_loss"] < 1

    for steps in (25, 60):
        parts = train.train(few_batches(), CONFIG_JSON, options(tmp_path / "parts", steps=steps))
    assert int(parts.step) == int(whole.step) == 60
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    # From the disk too, and done is done.
    again = train.train(few_batches(), CONFIG_JSON, options(tmp_path / "parts", steps=60))
    loaded, config_json = train.load_run(tmp_path / "parts")
    assert config_json == CONFIG_JSON
    for other in (again, loaded):
        jax.tree.map(np.testing.assert_array_equal, other, whole)

    with pytest.raises(ValueError, match="place in the data"):
        train.train(few_batches(), CONFIG_JSON, options(tmp_path / "parts", steps=99, seed=1))


def test_goes_on_from_an_export(tmp_path):
    """Without the optimiser's state, at the same step, the same data and biases, warming up."""
    first = options(tmp_path / "first", steps=12, schedule_steps=40)
    state = train.train(few_batches(), CONFIG_JSON, first)
    progress = (tmp_path / "first" / train.PROGRESS_FILE).read_text()
    target = export(
        tmp_path / "export",
        state.params,
        state.correction_bias,
        CONFIG_JSON,
        extra_files={train.PROGRESS_FILE: progress},
    )
    second = options(tmp_path / "second", steps=13, init_from=target, log_every=1)
    resumed = train.train(few_batches(), CONFIG_JSON, second)
    assert int(resumed.step) == 13
    after = json.loads((tmp_path / "second" / train.PROGRESS_FILE).read_text())
    assert after["data"] == {"next_index": 13}
    assert after["schedule"] == {
        "warmup_steps": train.REWARM_STEPS, "decay_fraction": 0.3, "total_steps": 40, "start": 12
    }  # fmt: skip
    (line,) = train.read_log(tmp_path / "second" / train.LOG_FILE)
    assert line["learning_rate"] == pytest.approx(1e-2 / train.REWARM_STEPS)


def test_correction_bias_moves_load_towards_balance(random_model):
    params, _ = random_model
    chosen = options(None, learning_rate=0.0)
    bias = np.zeros((2, CONFIG.n_routed_experts), np.float32)
    bias[:, 3] = 0.6  # nearly every token's choice
    mesh = train._make_mesh(chosen)
    state = train.TrainState(
        step=jnp.int32(0),
        params=jax.tree.map(jnp.copy, params),  # each step donates its state
        optimiser=train.make_optimiser(0.0).init(params),
        correction_bias=jnp.asarray(bias),
    )
    # Where `train` puts them, or the step is compiled again.
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))
    batch = jax.device_put(train._to_batch(packed(2)), train._by_row(mesh))
    step = train.make_step(CONFIG, chosen, mesh)
    excess = []
    for index in range(80):
        before = np.array(state.correction_bias)
        state, (metrics, _) = step(state, batch, np.float32(0), np.float32(0.01))
        load = np.asarray(metrics.expert_load)
        excess.append((load.max(-1) / load.mean(-1)).max())
        if index == 0:
            moved = np.asarray(state.correction_bias) - before
            expected = 0.01 * np.sign(load.mean(-1, keepdims=True) - load)
            np.testing.assert_allclose(moved, expected, atol=1e-6)
            assert (moved[:, 3] < 0).all()
    assert excess[0] > 2.5 and max(excess[-10:]) < 1.5, excess
    # Nothing but the biases moved.
    jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_devices_share_a_batch(tmp_path):
    states = [
        train.train(
            few_batches(), CONFIG_JSON, options(tmp_path / str(num), steps=2, num_devices=num)
        )
        for num in (1, 2)
    ]
    for name, value in states[0].params.items():
        np.testing.assert_allclose(states[1].params[name], value, atol=2e-4, err_msg=name)
    np.testing.assert_allclose(states[0].correction_bias, states[1].correction_bias, atol=1e-6)
    with pytest.raises(ValueError, match="divisible by the devices"):
        train.train(few_batches(), CONFIG_JSON, options(tmp_path / "3", steps=2, num_devices=3))


def test_schedule():
    constant = train.Schedule(warmup_steps=10, decay_fraction=0.25)
    assert [constant.factor(step) for step in (0, 4, 9, 10**6)] == [0.1, 0.5, 1, 1]
    whole = dataclasses.replace(constant, total_steps=100)
    # Knowing the end changes nothing before the decay.
    assert all(whole.factor(step) == constant.factor(step) for step in range(76))
    assert whole.factor(75) == 1 and whole.factor(100) == 0
    assert whole.factor(99) == pytest.approx(0.04)
    again = dataclasses.replace(whole, start=50, warmup_steps=10)
    assert again.factor(50) == 0.1 and again.factor(60) == 1


# The export


@pytest.fixture
def exported(random_model, tmp_path):
    return lambda name, **changes: export(tmp_path / name, *random_model, CONFIG_JSON, **changes)


def test_export_is_the_trained_model(exported, random_model, tmp_path):
    target = exported("bf16", max_shard_bytes=100_000, tokenizer_dir=EMBEDDED_MODEL)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    assert max(file.stat().st_size for file in files) < 120_000
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "mlp.experts.7.down_proj"):
        assert f"model.layers.2.{name}.weight" in weight_map
    config_json = json.loads((target / "config.json").read_text())
    assert config_json["torch_dtype"] == "bfloat16"
    tokenizer = Tokenizer.load(EMBEDDED_MODEL)
    assert config_json["eos_token_id"] == tokenizer.eos_token_id
    assert config_json["bos_token_id"] == tokenizer.bos_token_id
    params, bias = load_export(target)
    np.testing.assert_array_equal(bias, random_model[1])
    for name, value in random_model[0].items():
        np.testing.assert_array_equal(params[name], value.astype(jnp.bfloat16).astype(jnp.float32))
    with pytest.raises(ValueError, match="never overwrites"):
        exported("bf16")
    # FP8 leaves eh_proj alone, and both load.
    for model_dir in (target, quantize(target, tmp_path / "fp8")):
        loaded = load_hf(model_dir, sharding.make_mesh(2), dtype=jnp.float32)
        assert loaded.config.num_moe_layers == 1
    plain = exported("plain", with_mtp=False)
    assert json.loads((plain / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in exporting.find_tensors(plain) if "layers.2." in name]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_gives_the_same_logits_everywhere(exported, run_forward, random_model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompts = random_prompts(CONFIG, (7, LENGTH))

    def trained(tokens):
        # Followed by another document, so that one shape is compiled for all lengths.
        rest = LENGTH - len(tokens)
        arrays = packed(0, lengths=(len(tokens), rest) if rest else (LENGTH,))
        arrays["tokens"][:, : len(tokens)] = tokens
        hidden = run_forward(arrays).hidden.reshape(ROWS, LENGTH, -1)
        return np.asarray(model.logits(random_model[0], hidden[0]))[: len(tokens)]

    plain = exported("plain", dtype="float32", with_mtp=False)
    expected = trace_reference(load_reference(plain, dtype=jnp.float32), prompts, max_new_tokens=1)
    with_mtp = exported("mtp", dtype="float32")
    ours = load_hf(with_mtp, sharding.make_mesh(1), dtype=jnp.float32)
    prefill, decode = make_plans(
        "auto", ep_size=1, slots_per_rank=ours.slots_per_rank, max_dispatch_tokens_per_rank=128
    )
    served = trace_model(ours, Steps(ours, prefill=prefill, decode=decode), prompts, [7, LENGTH])
    for prompt, theirs, mine in zip(prompts, expected, served, strict=True):
        logits = trained(prompt)
        assert logits.shape == mine.logits.shape
        assert np.abs(logits).max() > 0.1
        assert np.abs(logits - theirs.logits).max() <= PARITY
        assert np.abs(logits - mine.logits).max() <= PARITY

    # transformers has no MTP layer, and leaves ours out with a warning of its own.
    loaded = transformers.DeepseekV3ForCausalLM.from_pretrained(
        with_mtp, local_files_only=True, dtype=torch.float32
    )
    with torch.inference_mode():
        theirs = loaded.eval()(torch.tensor([prompts[1]])).logits[0].numpy()
    assert np.abs(theirs - expected[1].logits).max() <= PARITY
