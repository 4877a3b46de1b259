"""DeepEP without a GPU: what its buffers take, what is refused, and the programs that call it."""

import ctypes
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from custom_calls import ep, runtime
from custom_calls.deep_ep import library, sizes
from custom_calls.runtime import EpSpec


def spec(**fields):
    return EpSpec(**{"max_ep_size": 2, "slots_per_rank": 128, "hidden_size": 7168, "top_k": 8,
                     "normal_tokens": 4096, "low_latency_tokens": 128, "backend": "deepep"}
                    | fields)  # fmt: skip


# What `get_low_latency_rdma_size_hint` and `Config.get_nvl_buffer_size_hint` of sgl-deep-ep
# 0.1.2.post1 return.
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "expected"),
    [(128, 7168, 256, 1908410496), (64, 2048, 64, 68158080)],
)
def test_low_latency_size_is_the_package_s_own(tokens, hidden, experts, expected):
    assert sizes.low_latency_bytes(tokens, hidden, experts) == expected


@pytest.mark.parametrize(
    ("row_bytes", "ranks", "sms", "expected"),
    [(14336, 8, 20, 335709824), (14336, 2, 24, 100712960), (4096, 4, 20, 62997376)],
)
def test_normal_size_is_the_package_s_own(row_bytes, ranks, sms, expected):
    assert sizes.normal_bytes(row_bytes, ranks, num_sms=sms) == expected


def test_a_group_s_memory_is_that_of_its_modes():
    both = spec(num_micro_batches=2)
    normal, low_latency = spec(low_latency_tokens=0), spec(normal_tokens=0)
    assert low_latency.bytes_per_rank == sizes.low_latency_bytes(128, 7168, 256)
    assert normal.bytes_per_rank == sizes.normal_bytes(14336, 2)
    assert both.bytes_per_rank == 2 * (normal.bytes_per_rank + low_latency.bytes_per_rank)
    # Slabs may be rounded up to the alignment of the grouped GEMM's rows.
    assert spec(low_latency_tokens=1).low_latency_bytes == both.low_latency_bytes


PACKAGE = types.SimpleNamespace(
    low_latency_hidden_sizes=[2048, 7168], low_latency_max_top_k=16, normal_num_ranks=[2, 4, 8]
)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"itemsize": 4}, "moves bfloat16, got numbers of 4 bytes"),
        ({"hidden_size": 512}, r"compiled for hidden_size \[2048, 7168\], got 512"),
        ({"top_k": 17}, "at most 16 experts a token, got 17"),
        ({"low_latency_sms": 18}, r"every 14 experts \(256\), got low_latency_sms 18"),
        ({"low_latency_sms": 1}, "two multiprocessors at least, .* low_latency_sms 1"),
        ({"max_ep_size": 1, "slots_per_rank": 1}, "two slots .* got 1 slots in all"),
        ({"max_ep_size": 1}, r"compiled for \[2, 4, 8\] ranks, got 1"),
        ({"normal_sms": 5}, "normal_sms must be even and positive, got 5"),
        ({"slots_per_rank": 129}, "at most 128 slots a rank, got 129"),
        ({"hidden_size": 8192, "low_latency_tokens": 0}, "hidden_size 8192 has 16384"),
    ],
)
def test_what_has_no_kernels_is_refused(monkeypatch, fields, error):
    monkeypatch.setattr(library, "_library", lambda: PACKAGE)
    library.check(spec())
    with pytest.raises(ValueError, match=error):
        library.check(spec(**fields))


def test_cpus_are_refused():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("ep",))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="'deepep' runs on 'gpu' devices, got 'cpu'"):
            runtime.bootstrap(mesh, spec())
        assert library.missing() is not None
    with pytest.raises(ValueError, match="backend must be one of"):
        spec(backend="nccl")
    with pytest.raises(ValueError, match="only loopback's link can be modelled"):
        spec(link=runtime.Link())


def test_stubs_stand_for_the_libraries_that_are_not_needed():
    _cuda = pytest.importorskip("custom_calls._cuda", reason="CUDA's headers were not found")
    stubs = library.stubs(_cuda)
    assert len(stubs) == 8
    for stub in stubs:
        assert ctypes.c_char.in_dll(ctypes.CDLL(stub), "_ZTVN3c105ErrorE").value == b"\0"


def test_devices_begin_anew_when_the_active_ranks_change():
    """A rank that comes back must not find what was sent before; of a process all or none do."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("ep",))
    group = runtime.bootstrap(mesh, spec(max_ep_size=4, hidden_size=8, backend="loopback",
                                         normal_tokens=4, low_latency_tokens=4))  # fmt: skip
    calls = []
    group._devices = types.SimpleNamespace(
        clear=lambda: calls.append("clear"), set_active=calls.append, lost=list
    )
    try:
        group.set_active([1, 0])
        assert calls == ["clear", (0, 1)]
        for ranks, torn in (([1], "1 of the 2 of member 0"), ([0, 1, 2], "1 of the 2 of member 1")):
            with pytest.raises(ValueError, match=rf"all ranks of a process .*: {torn}"):
                group.set_active(ranks)
        assert group.wait_active()  # as before
        group.recover()
        assert calls == 2 * ["clear", (0, 1)]
    finally:
        group._devices = None
        runtime.shutdown()


@pytest.fixture
def group(monkeypatch):
    """A group that only has a spec: enough to trace with."""
    group = object.__new__(runtime.EpGroup)
    group.spec, group.first_rank = spec(max_ep_size=4, slots_per_rank=8), 2
    monkeypatch.setattr(runtime, "_current", group)
    return group


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("mode", "options", "calls"),
    [
        ("normal", {}, ["normal_dispatch", "normal_combine"]),
        ("low_latency", {}, ["low_latency_dispatch_start", "low_latency_combine_start"]),
        ("low_latency", {"split": True}, ["low_latency_dispatch_start",
         "low_latency_dispatch_finish", "low_latency_combine_start",
         "low_latency_combine_finish"]),
    ],
)  # fmt: skip
def test_programs_call_the_handlers_in_order(group, mode, options, calls, fp8):
    """Lowered for CUDA, not run: the calls, and that no result of a split start is copied."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("ep",))
    table = {"normal": ep.NORMAL, "low_latency": ep.LOW_LATENCY}[mode]
    # The implementations of `permute` for GPUs cannot be traced everywhere.
    dispatcher = table["deepep"](
        axis_name="ep", slots_per_rank=8, alignment=128, fp8=fp8, permute="reference",
        quantize="reference", **options,
    )  # fmt: skip
    assert isinstance(dispatcher, ep.Dispatcher)

    def run(x, idx, weights):
        arrived = dispatcher.dispatch_finish(dispatcher.dispatch_start(x, idx, weights))
        tokens = arrived.tokens
        assert (tokens.scale is not None) == fp8
        if mode == "low_latency":
            assert tokens.x.shape == (8, 128, 7168)  # 4 ranks, 30 tokens rounded up to 32
        y = type(tokens)(jnp.ones_like(tokens.x, jnp.bfloat16), *jax.tree.leaves(tokens)[1:2])
        back = dispatcher.combine_start(y, arrived.handle)
        return dispatcher.combine_finish(back, arrived.handle)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    arguments = (
        jax.ShapeDtypeStruct((60, 7168), jnp.bfloat16),
        jax.ShapeDtypeStruct((60, 8), jnp.int32),
        jax.ShapeDtypeStruct((60, 8), jnp.float32),
    )
    lowered = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    found = [line for line in text.splitlines() if "@jaxmoe_cuda_deep_ep_" in line]
    assert [line.split("@jaxmoe_cuda_deep_ep_")[1].split("(")[0] for line in found] == calls
    for line in found:
        is_aliased = "output_operand_alias" in line
        assert is_aliased == ("finish" in line or "normal_combine" in line)
        assert "has_side_effect = true" in line


@pytest.mark.parametrize(("fp8", "capacity"), [(False, 120), (True, 128)])
def test_fp8_slabs_end_at_a_multiple_of_128(group, fp8, capacity):
    """The kernel puts the scales of two experts that many rows apart (4 ranks, 30 tokens)."""
    dispatcher = ep.LOW_LATENCY["deepep"](axis_name="ep", slots_per_rank=8, alignment=4, fp8=fp8)
    x, idx = jnp.zeros((30, 7168), jnp.bfloat16), jnp.zeros((30, 8), jnp.int32)

    def start(x, idx):
        in_flight = dispatcher.dispatch_start(x, idx, idx.astype(jnp.float32))
        return in_flight.x, in_flight.scale

    sent, scale = jax.eval_shape(start, x, idx)
    assert sent.shape == (8, capacity, 7168)
    assert scale.shape == ((8, 7168 // 128, capacity) if fp8 else (1,))
