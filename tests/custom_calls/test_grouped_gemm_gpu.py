"""The implementations of `grouped_gemm` and `gemm_fp8` for GPUs, with NaN in rows of no group."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.grouped_gemm import DOWN, GATE_UP, Case, make_inputs, operation
from custom_calls import deep_gemm
from custom_calls.gemm import api as gemm_api
from custom_calls.grouped_gemm import api
from custom_calls.layouts import ContiguousTokens, MaskedTokens
from custom_calls.quantize import reference


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU"),
]

TOLERANCE = 2e-3  # of the whole tensor; rounding to bfloat16 alone makes 1.6e-3
IMPLEMENTATIONS = [
    ("deep_gemm", "fp8"),
    ("deep_gemm", "bf16"),
    ("pallas", "bf16"),
    ("ragged_dot", "bf16"),
]
LAYOUTS = {"contiguous": "ContiguousTokens", "masked": "MaskedTokens"}
# The kernels of "deep_gemm" are compiled for a number of groups, so most cases share theirs.
COUNTS = (0, 1, 63, 64, 65, 127, 128)
SIZES = {
    "empty_groups": ((0, 130, 0, 128, 1, 0, 0), 640),
    "one_takes_all": ((0, 0, 512, 0, 0, 0, 0), 512),
    "nothing": ((0, 0, 0, 0, 0, 0, 0), 256),
    "room_left": ((5, 0, 200, 64, 0, 129, 0), 1536),
    "one_past_full": ((128, 1, 0, 0, 0, 0, 129), 384),
    "start_past_full": ((128, 300, 7, 0, 0, 9, 1), 256),
}
MATRICES = {
    "small": (256, 256),
    "shallow": (256, 128),
    "cut_block": (64, 192),
    "odd": (48, 144),
    "gate_up": GATE_UP[1:],
    "down": DOWN[1:],
}
PALLAS_MATRICES = tuple(name for name in MATRICES if name != "odd")  # its depth must be 64s
DENSE = {"one_row": (1, "small"), "rows_of_odd": (130, "odd"), "kv_a": (100, (576, 7168))}


def _contiguous(kind, name="empty_groups", matrix="small"):
    sizes, rows = SIZES[name]
    return Case(name, "contiguous", kind, *MATRICES[matrix], sizes, rows)


def _masked(kind, matrix="small", counts=COUNTS):
    return Case("counts", "masked", kind, *MATRICES[matrix], counts, 128)


def _dense(name):
    rows, matrix = DENSE[name]
    num_out, depth = MATRICES.get(matrix, matrix)
    return Case(name, "dense", "fp8", num_out, depth, (rows,), rows)


def _all_cases(kind):
    yield from (_contiguous(kind, name) for name in SIZES)
    for matrix in MATRICES:
        yield _contiguous(kind, matrix=matrix)
        yield _masked(kind, matrix)
    yield _masked(kind, counts=(0,) * len(COUNTS))
    if kind == "fp8":
        yield from map(_dense, DENSE)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All kernels of "deep_gemm" at once, side by side: seconds each, one after the other."""
    if deep_gemm.missing() is not None:
        return
    for case in (case for kind in ("fp8", "bf16") for case in _all_cases(kind)):
        shapes = jax.eval_shape(functools.partial(make_inputs, case, 0))
        jax.eval_shape(operation(case, "deep_gemm"), *shapes)


@pytest.fixture(params=IMPLEMENTATIONS, ids="_".join)
def implementation(request):
    """(name, kind), skipped where it cannot run."""
    name, kind = request.param
    for layout in LAYOUTS.values():
        reason = api._TABLES[layout, kind][name].missing()
        if reason is not None:
            pytest.skip(reason)
    return name, kind


def _rows(case):
    """A group's rows, as far as they exist."""
    if case.layout == "masked":
        return case.owned
    return [owned[owned < case.rows] for owned in case.owned]


def _fill(case, inputs, value):
    """The inputs with `value` in rows of no group, in their scales too."""
    tokens, weights = inputs
    is_owned = np.zeros(case.rows * (case.num_groups if case.layout == "masked" else 1), bool)
    is_owned[np.concatenate(_rows(case)).astype(int)] = True
    is_owned = jnp.asarray(is_owned.reshape(tokens.x.shape[:-1]))
    x = jnp.where(is_owned[..., None], tokens.x, jnp.asarray(value, tokens.x.dtype))
    scale = tokens.scale
    if scale is not None:
        padding = [(0, 0)] * (is_owned.ndim - 1) + [(0, scale.shape[-1] - case.rows)]
        keeps = jnp.pad(is_owned, padding)[..., None, :]
        scale = jnp.where(keeps, scale, jnp.float32(value))
    return dataclasses.replace(tokens, x=x, scale=scale), weights


def _float64(array):
    # Unspecified rows may hold signalling NaNs.
    with np.errstate(invalid="ignore"):
        return np.asarray(array.astype(jnp.float32), np.float64)


def _check(case, inputs, y):
    """The norm of the difference to float64 on the same operands, over the norm of the result."""
    tokens, weights = inputs
    if case.kind == "fp8":
        weights = reference.dequantize_weight(weights)
    if case.layout == "dense":
        x, weights = reference.dequantize_rows(tokens), weights[None]
    else:
        x = (reference.dequantize_tokens(tokens) if case.kind == "fp8" else tokens).x
    assert y.shape == (*x.shape[:-1], case.num_out)
    assert y.dtype == jnp.bfloat16
    x, y = (_float64(array).reshape(-1, array.shape[-1]) for array in (x, y))
    difference = total = 0.0
    for rows, weight in zip(_rows(case), weights, strict=True):
        if len(rows):
            right = x[rows] @ _float64(weight).T
            difference += np.sum((y[rows] - right) ** 2)
            total += np.sum(right**2)
    assert difference <= TOLERANCE**2 * total, np.sqrt(difference / max(total, 1e-30))


def _run_and_check(case, name):
    inputs = _fill(case, make_inputs(case, 1), np.nan)
    _check(case, inputs, jax.jit(operation(case, name))(*inputs))


@pytest.mark.parametrize("sizes", SIZES)
def test_contiguous_sizes(sizes, implementation):
    name, kind = implementation
    _run_and_check(_contiguous(kind, sizes), name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_matrices(matrix, layout, implementation):
    name, kind = implementation
    if name == "pallas" and matrix not in PALLAS_MATRICES:
        pytest.skip("the kernel needs a depth that is a multiple of 64")
    make = _contiguous if layout == "contiguous" else _masked
    _run_and_check(make(kind, matrix=matrix), name)


def test_masked_without_tokens(implementation):
    name, kind = implementation
    _run_and_check(_masked(kind, counts=(0,) * len(COUNTS)), name)


@pytest.mark.parametrize("name", DENSE)
def test_gemm_fp8(name):
    reason = gemm_api._FP8["deep_gemm"].missing()
    if reason is not None:
        pytest.skip(reason)
    case = _dense(name)
    inputs = make_inputs(case, 2)
    _check(case, inputs, jax.jit(operation(case, "deep_gemm"))(*inputs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_no_group_do_not_matter(layout, implementation):
    name, kind = implementation
    case = _contiguous(kind, "room_left") if layout == "contiguous" else _masked(kind)
    inputs = make_inputs(case, 3)
    run = jax.jit(operation(case, name))
    results = [run(*_fill(case, inputs, value)) for value in (np.nan, 0.0)]
    rows = np.concatenate(_rows(case)).astype(int)
    bits = [
        np.asarray(jax.lax.bitcast_convert_type(y, jnp.uint16)).reshape(-1, case.num_out)[rows]
        for y in results
    ]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_shard_map(layout, check_vma, implementation):
    """Every local device at once, tokens of its own and the same weights."""
    name, kind = implementation
    if name == "pallas" and check_vma:
        pytest.skip("the kernel does not say over which axes its result varies")
    case = _contiguous(kind) if layout == "contiguous" else _masked(kind)
    num_devices = len(jax.local_devices())
    tokens = [_fill(case, make_inputs(case, seed), np.nan)[0] for seed in range(num_devices)]
    weights = make_inputs(case, 0)[1]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tokens)

    def local(tokens, weights):
        tokens = jax.tree.map(lambda leaf: leaf[0], tokens)
        return operation(case, name)(tokens, weights)[None]

    mesh = jax.make_mesh(
        (num_devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.local_devices()
    )
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=check_vma
    )
    for each, y in zip(tokens, jax.jit(run)(stacked, weights), strict=True):
        _check(case, (each, weights), y)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launches_are_counted(layout, kind):
    if (reason := deep_gemm.missing()) is not None:
        pytest.skip(reason)
    case = _contiguous(kind) if layout == "contiguous" else _masked(kind)
    inputs = make_inputs(case, 4)
    run = jax.jit(operation(case, "deep_gemm"))
    jax.block_until_ready(run(*inputs))
    before, nanoseconds = deep_gemm.launches(), deep_gemm.host_nanoseconds()
    for _ in range(3):
        jax.block_until_ready(run(*inputs))
    counts = {key: count - before[key] for key, count in deep_gemm.launches().items()}
    assert {key: count for key, count in counts.items() if count} == {f"{kind}_{layout}": 3}
    assert deep_gemm.host_nanoseconds() > nanoseconds


def test_command_buffers_replay_without_calls():
    if (reason := deep_gemm.missing()) is not None:
        pytest.skip(reason)
    case = _masked("fp8")
    sets = [make_inputs(case, seed) for seed in range(12)]
    op = operation(case, "deep_gemm")
    run = jax.jit(lambda sets: [op(*each) for each in sets])
    before = deep_gemm.launches()
    for _ in range(4):
        results = jax.block_until_ready(run(sets))
    after = deep_gemm.launches()
    assert after["captured"] > before["captured"]
    for each, y in zip(sets, results, strict=True):
        _check(case, each, y)


def test_what_cannot_run_raises():
    sizes = jnp.array([128, 3], jnp.int32)
    x, weights = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((2, 64, 128), jnp.bfloat16)
    tokens = ContiguousTokens(x, sizes, 128)
    with pytest.raises(RuntimeError, match=r"'cpu' .* cannot run: it needs 'cpu'"):
        api.grouped_gemm(tokens, weights, implementation="cpu")
    case = _contiguous("fp8")
    with pytest.raises(ValueError, match="no implementation 'pallas'"):
        operation(case, "pallas")(*make_inputs(case, 5))
    wide = dataclasses.replace(tokens, x=x.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"f32.* has no implementation 'deep_gemm'"):
        api.grouped_gemm(wide, weights.astype(jnp.float32), implementation="deep_gemm")


def test_what_pallas_cannot_multiply_raises():
    reason = api._TABLES["ContiguousTokens", "bf16"]["pallas"].missing()
    if reason is not None:
        pytest.skip(reason)
    counts = jnp.array([4], jnp.int32)
    with pytest.raises(ValueError, match=r"f32.* has no implementation 'pallas'"):
        tokens = MaskedTokens(jnp.ones((1, 64, 128)), counts)
        api.grouped_gemm(tokens, jnp.ones((1, 64, 128)), implementation="pallas")
    with pytest.raises(ValueError, match=r"K to be a multiple of 64 .* K 144"):
        tokens = MaskedTokens(jnp.ones((1, 64, 144), jnp.bfloat16), counts)
        weights = jnp.ones((1, 64, 144), jnp.bfloat16)
        api.grouped_gemm(tokens, weights, implementation="pallas")
