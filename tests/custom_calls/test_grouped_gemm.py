import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls.grouped_gemm import api
from custom_calls.layouts import ContiguousTokens, MaskedTokens


IMPLEMENTATIONS = ["reference", "cpu"]
TOLERANCES = {
    jnp.float32: {"rtol": 1e-5, "atol": 1e-4},
    jnp.bfloat16: {"rtol": 8e-3, "atol": 1e-2},
}

grouped_gemm = jax.jit(api.grouped_gemm, static_argnames="implementation")

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)


def _normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _float64(x):
    # Unspecified rows may hold signalling NaNs.
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float32).astype(np.float64)


def _rows(sizes, max_rows, alignment=1):
    """(group, row) of every row that a group owns, in numpy."""
    start = 0
    for group, size in enumerate(sizes):
        for row in range(start, min(start + size, max_rows)):
            yield group, row
        start += -(-size // alignment) * alignment


def _contiguous(sizes, max_rows, depth, dtype, alignment=1, fill=np.nan):
    x = np.full((max_rows, depth), fill, np.float32)
    values = _normal(1, (max_rows, depth))
    for _, row in _rows(sizes, max_rows, alignment):
        x[row] = values[row]
    return ContiguousTokens(jnp.asarray(x, dtype), jnp.asarray(sizes, jnp.int32), alignment)


def _masked(counts, capacity, depth, dtype, fill=np.nan):
    x = np.array(_normal(2, (len(counts), capacity, depth)))
    for group, count in enumerate(counts):
        x[group, count:] = fill
    return MaskedTokens(jnp.asarray(x, dtype), jnp.asarray(counts, jnp.int32))


def _check_contiguous(tokens, weights, y):
    assert isinstance(y, ContiguousTokens)
    assert y.x.shape == (tokens.x.shape[0], weights.shape[1])
    assert y.x.dtype == tokens.x.dtype
    assert y.alignment == tokens.alignment
    np.testing.assert_array_equal(y.group_sizes, tokens.group_sizes)
    x, w, y64 = _float64(tokens.x), _float64(weights), _float64(y.x)
    sizes = np.asarray(tokens.group_sizes)
    for group, row in _rows(sizes, x.shape[0], tokens.alignment):
        np.testing.assert_allclose(
            y64[row], w[group] @ x[row], **TOLERANCES[tokens.x.dtype.type], err_msg=f"row {row}"
        )


def _check_masked(tokens, weights, y):
    assert isinstance(y, MaskedTokens)
    assert y.x.shape == (*tokens.x.shape[:2], weights.shape[1])
    assert y.x.dtype == tokens.x.dtype
    np.testing.assert_array_equal(y.counts, tokens.counts)
    x, w, y64 = _float64(tokens.x), _float64(weights), _float64(y.x)
    for group, count in enumerate(np.asarray(tokens.counts)):
        np.testing.assert_allclose(
            y64[group, :count],
            x[group, :count] @ w[group].T,
            **TOLERANCES[tokens.x.dtype.type],
            err_msg=f"group {group}",
        )


# (sizes, max_rows, alignment)
CONTIGUOUS_EDGES = {
    "no_tokens": ([0, 0, 0], 8, 1),
    "no_rows": ([0, 0], 0, 1),
    "no_groups": ([], 4, 1),
    "one_group_takes_all": ([0, 17, 0], 17, 1),
    "empty_groups": ([3, 0, 0, 5, 0], 11, 1),
    "exactly_full": ([4, 4, 8], 16, 4),
    "one_past_full": ([4, 4, 9], 16, 4),
    "start_past_full": ([9, 9, 3], 16, 8),
    "aligned": ([3, 0, 9, 1], 32, 8),
}
MASKED_EDGES = {
    "no_tokens": ([0, 0, 0], 4),
    "no_capacity": ([0, 0], 0),
    "no_groups": ([], 4),
    "one_group_takes_all": ([0, 7, 0], 7),
    "empty_groups": ([3, 0, 0, 5, 0], 6),
    "exactly_full": ([5, 5], 5),
    "one_past_full": ([6, 5], 5),
}


@all_implementations
@all_dtypes
@pytest.mark.parametrize("edge", list(CONTIGUOUS_EDGES))
def test_contiguous_edges(edge, dtype, implementation):
    sizes, max_rows, alignment = CONTIGUOUS_EDGES[edge]
    tokens = _contiguous(sizes, max_rows, 40, dtype, alignment)
    weights = _normal(3, (len(sizes), 24, 40), dtype)
    _check_contiguous(tokens, weights, grouped_gemm(tokens, weights, implementation=implementation))


@all_implementations
@all_dtypes
@pytest.mark.parametrize("edge", list(MASKED_EDGES))
def test_masked_edges(edge, dtype, implementation):
    counts, capacity = MASKED_EDGES[edge]
    tokens = _masked(counts, capacity, 40, dtype)
    weights = _normal(4, (len(counts), 24, 40), dtype)
    _check_masked(tokens, weights, grouped_gemm(tokens, weights, implementation=implementation))


@all_implementations
@all_dtypes
@pytest.mark.parametrize(
    "num_out, depth", [(0, 8), (8, 0), (1, 1), (2, 15), (3, 33), (5, 16), (7, 100)]
)
def test_sizes_off_the_vector_width(num_out, depth, dtype, implementation):
    tokens = _contiguous([1, 2, 7], 10, depth, dtype)
    weights = _normal(5, (3, num_out, depth), dtype)
    _check_contiguous(tokens, weights, grouped_gemm(tokens, weights, implementation=implementation))


@all_implementations
@all_dtypes
def test_many_blocks(dtype, implementation):
    tokens = _contiguous([130, 1, 70], 256, 300, dtype, 16)
    weights = _normal(6, (3, 200, 300), dtype)
    _check_contiguous(tokens, weights, grouped_gemm(tokens, weights, implementation=implementation))
    tokens = _masked([100, 128], 128, 300, dtype)
    weights = weights[:2]
    _check_masked(tokens, weights, grouped_gemm(tokens, weights, implementation=implementation))


@all_dtypes
@pytest.mark.parametrize("depth", [77, 256])
def test_a_row_depends_on_itself_alone(depth, dtype):
    """Any batch, layout, block position and number of threads gives the same bits."""
    num_rows, num_out = 230, 131
    # numpy: JAX would compile every slice and comparison.
    x = np.asarray(_normal(7, (num_rows, depth), dtype))
    weights = np.asarray(_normal(8, (2, num_out, depth), dtype))

    def contiguous(x, sizes, weights=weights):
        tokens = ContiguousTokens(x, np.array(sizes, np.int32))
        return np.asarray(grouped_gemm(tokens, weights, implementation="cpu").x)

    large = contiguous(x, [0, num_rows])
    for size in (1, 2, 3, 4, 5, 7, 13):
        assert (contiguous(x[:size], [0, size]) == large[:size]).all(), size
    shifted = contiguous(x[101:], [5, 124])
    assert (shifted[5:] == large[106:]).all()
    blocks = MaskedTokens(x.reshape(2, 115, depth), np.array([115, 77], np.int32))
    masked = np.asarray(grouped_gemm(blocks, weights[[1, 1]], implementation="cpu").x)
    assert (masked[0] == large[:115]).all()
    assert (masked[1, :77] == large[115:192]).all()
    single = contiguous(x[9:10], [1], weights[1:, 5:6])
    assert single[0, 0] == large[9, 5]


def test_nan_and_infinity_survive_rounding():
    x = jnp.array([[jnp.nan], [jnp.inf], [3.3e38]], jnp.bfloat16)
    weights = jnp.ones((1, 1, 1), jnp.bfloat16)
    tokens = ContiguousTokens(x, jnp.array([3], jnp.int32))
    y = grouped_gemm(tokens, weights, implementation="cpu").x[:, 0]
    assert jnp.isnan(y[0])
    assert y[1] == jnp.inf
    assert y[2] == x[2, 0]


def test_best_on_cpu_is_the_handler():
    tokens = _contiguous([2, 2], 4, 8, jnp.float32)
    weights = _normal(9, (2, 4, 8))
    compiled = grouped_gemm.lower(tokens, weights).compile()
    assert "jaxmoe_cpu_grouped_gemm_contiguous" in compiled.as_text()


@pytest.mark.parametrize("sizes", [[2, -1], [-(2**31), 2**31 - 1]])
def test_negative_sizes_are_an_error_of_the_handler(sizes):
    weights = _normal(10, (2, 4, 8))
    sizes = jnp.array(sizes, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"group_sizes.* must not be negative"):
        tokens = ContiguousTokens(jnp.ones((4, 8)), sizes)
        grouped_gemm(tokens, weights, implementation="cpu").x.block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"counts.* must not be negative"):
        tokens = MaskedTokens(jnp.ones((2, 4, 8)), sizes)
        grouped_gemm(tokens, weights, implementation="cpu").x.block_until_ready()


@pytest.mark.parametrize("alignment", [1, 2**31, 2**63 - 1])
def test_oversized_counts_stay_inside(alignment):
    weights = _normal(11, (3, 4, 8))
    huge = jnp.full((3,), 2**31 - 1, jnp.int32)
    x = _normal(12, (5, 8))
    y = grouped_gemm(ContiguousTokens(x, huge, alignment), weights, implementation="cpu").x
    np.testing.assert_allclose(y, x @ weights[0].T, **TOLERANCES[jnp.float32])
    blocks = jnp.stack([x, x, x])
    y = grouped_gemm(MaskedTokens(blocks, huge), weights, implementation="cpu").x
    np.testing.assert_allclose(
        y, np.einsum("eck,enk->ecn", blocks, weights), **TOLERANCES[jnp.float32]
    )


def test_bad_arguments():
    weights = jnp.ones((2, 4, 8))
    sizes = jnp.array([1, 1], jnp.int32)
    with pytest.raises(ValueError, match=r"\(4, 9\).*\(2, 4, 8\).* one depth K"):
        grouped_gemm(ContiguousTokens(jnp.ones((4, 9)), sizes), weights)
    with pytest.raises(ValueError, match=r"group_sizes must be int32\[2\].*\[3\]"):
        grouped_gemm(ContiguousTokens(jnp.ones((4, 8)), jnp.zeros((3,), jnp.int32)), weights)
    with pytest.raises(ValueError, match=r"counts must be int32\[2\].*float32"):
        grouped_gemm(MaskedTokens(jnp.ones((2, 4, 8)), jnp.ones((2,))), weights)
    with pytest.raises(ValueError, match="one number of groups e"):
        grouped_gemm(MaskedTokens(jnp.ones((3, 4, 8)), sizes), weights)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        grouped_gemm(ContiguousTokens(jnp.ones((4, 8)), sizes), weights.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="float16 and float16"):
        x = jnp.ones((4, 8), jnp.float16)
        grouped_gemm(ContiguousTokens(x, sizes), weights.astype(jnp.float16))
    with pytest.raises(ValueError, match="alignment must be positive, got 0"):
        grouped_gemm(ContiguousTokens(jnp.ones((4, 8)), sizes, 0), weights)
    with pytest.raises(ValueError, match=r"no implementation 'fast'"):
        grouped_gemm(ContiguousTokens(jnp.ones((4, 8)), sizes), weights, implementation="fast")


@all_implementations
@all_dtypes
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, dtype, implementation):
    """Eight devices at once, each with enough work to ask for the same threads."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tokens = [_contiguous([60 + i, 0, 60 - i], 128, 96, dtype) for i in range(8)]
    weights = _normal(13, (3, 200, 96), dtype)
    x = np.concatenate([t.x for t in tokens])
    sizes = np.concatenate([t.group_sizes for t in tokens])
    spec = ContiguousTokens(P("x"), P("x"))

    run = jax.jit(
        jax.shard_map(
            functools.partial(grouped_gemm, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, P()),
            out_specs=spec,
            check_vma=check_vma,
        )
    )
    for _ in range(5):
        y = run(ContiguousTokens(x, sizes), weights)
    y = jax.tree.map(np.asarray, y)
    for i in range(8):
        local = ContiguousTokens(
            y.x[i * 128 : (i + 1) * 128], y.group_sizes[i * 3 : (i + 1) * 3], 1
        )
        _check_contiguous(tokens[i], weights, local)
