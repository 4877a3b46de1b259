"""DeepEP on GPUs: on one rank, on several processes that share a GPU, and on several GPUs."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from custom_calls import runtime
from custom_calls.deep_ep import library
from tests.custom_calls.ep_steps import Member, processes, run


pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU")
several_gpus = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two CUDA GPUs"),
]

LOW_LATENCY = {
    "bf16": {"low_latency": {}},
    "fp8": {"low_latency": {"fp8": True}},
    "bf16_split": {"low_latency": {"split": True}},
    "fp8_split_aligned": {"low_latency": {"fp8": True, "split": True, "alignment": 128}},
}
NORMAL = {
    "normal": {"normal": {}},
    "normal_fp8": {"normal": {"fp8": True}},
    "both": {"normal": {"alignment": 128}, "low_latency": {}},
}
HOW = {"backend": "deepep", "hidden": 2048, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def deep_ep_can_run():
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    yield
    runtime.shutdown()


def launched(before):
    """What has been launched since, without what has not."""
    since = {name: count - before[name] for name, count in library.launches().items()}
    return {name for name, count in since.items() if count and name != "captured"}


@pytest.mark.gpu
@pytest.mark.parametrize("options", LOW_LATENCY.values(), ids=LOW_LATENCY)
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_one_rank(options, slots):
    member = Member(**HOW, options=options, slots_per_rank=slots)
    before = library.launches()
    run(member, 50, seed=slots)
    is_split = options["low_latency"].get("split")
    kernels = ("dispatch", "combine")
    assert launched(before) == (
        {f"low_latency_{kernel}_{half}" for kernel in kernels for half in ("send", "receive")}
        if is_split
        else {f"low_latency_{kernel}" for kernel in kernels}
    )


@pytest.mark.gpu
@pytest.mark.parametrize("options", (LOW_LATENCY | NORMAL).values(), ids=LOW_LATENCY | NORMAL)
def test_two_processes_on_one_gpu(options, monkeypatch):
    """Correct; how fast says nothing, the processes take turns on the GPU."""
    monkeypatch.setitem(os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with processes(2, run, 60, options=options, **HOW) as (_, members):
        for member in members:
            assert member.read_until("done|error")[0] == "done", member.lines


@pytest.mark.gpu
def test_inactive_ranks_are_not_waited_for():
    """Three ranks of which one exists."""
    member = Member(**HOW, options={"low_latency": {}}, max_ep_size=3)
    member.group.set_active([0])
    for seed in range(20):
        member.step(seed, "low_latency", active=[0])
    assert member.group.failure is None


@pytest.mark.gpu
def test_memory_is_what_the_spec_says(caplog):
    with caplog.at_level("INFO", logger="custom_calls.runtime"):
        member = Member(**HOW, options={"low_latency": {}})
    assert f"{member.group.spec.bytes_per_rank} bytes a rank" in caplog.text
    with pytest.raises(RuntimeError, match=r"call custom_calls\.runtime\.shutdown"):
        runtime.bootstrap(member.mesh, dataclasses.replace(member.group.spec, top_k=1))


@pytest.mark.gpu
def test_command_buffers_replay_the_exchange():
    member = Member(**HOW, options={"low_latency": {}})
    before = library.launches()
    x, idx, weights = (jnp.asarray(a) for a in member.case(3, [0]))
    once = np.asarray(member.programs["low_latency"](x, idx, weights))

    @jax.jit
    def often(x, idx, weights):
        for _ in range(6):  # enough to be worth a command buffer
            y = member.programs["low_latency"](x, idx, weights)
            x, y = jax.lax.optimization_barrier((x, y))
        return y

    for _ in range(4):
        y = np.asarray(often(x, idx, weights))
    assert library.launches()["captured"] > before["captured"]
    np.testing.assert_array_equal(y, once)


@pytest.mark.parametrize(
    "options",
    [pytest.param(value, id=name, marks=several_gpus) for name, value in
     (LOW_LATENCY | NORMAL).items()],
)  # fmt: skip
def test_several_gpus_in_one_process(options):
    num_ranks = 1 << (len(jax.devices()).bit_length() - 1)
    run(Member(**HOW, options=options, devices=num_ranks), 100)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"hidden_size": 512}, "compiled for hidden_size"),
        ({"slots_per_rank": 1}, "needs two slots"),
        ({"normal_tokens": 8}, "is compiled for .* ranks, got 1"),
    ],
)
def test_what_has_no_kernels_is_refused(fields, error):
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("ep",))
    spec = dict(max_ep_size=1, slots_per_rank=4, hidden_size=2048, top_k=2, low_latency_tokens=4)
    with pytest.raises(ValueError, match=error):
        runtime.bootstrap(mesh, runtime.EpSpec(**spec | fields, backend="deepep"))
