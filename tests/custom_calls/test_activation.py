import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls import activation
from custom_calls.layouts import ContiguousTokens, MaskedTokens


IMPLEMENTATIONS = ["reference", "cpu"]
TOLERANCES = {
    jnp.float32: {"rtol": 1e-6, "atol": 1e-30},
    jnp.bfloat16: {"rtol": 4e-3, "atol": 1e-30},
}

silu_and_mul = jax.jit(activation.silu_and_mul, static_argnames="implementation")

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)


def _rows(seed, shape, dtype):
    x = np.random.default_rng(seed).standard_normal(shape) * 10
    return jnp.asarray(x, dtype)


def _want(x):
    with np.errstate(invalid="ignore"):
        gate, up = np.split(np.asarray(x.astype(jnp.float32), np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def _check(got, want, dtype):
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want, **TOLERANCES[dtype])


@all_implementations
@all_dtypes
@pytest.mark.parametrize("width", [0, 1, 15, 16, 100])
@pytest.mark.parametrize(
    "sizes, max_rows, alignment",
    [([], 3, 1), ([0, 0], 0, 1), ([3, 0, 5], 8, 1), ([3, 0, 5], 20, 8), ([9, 9], 12, 4)],
)
def test_contiguous(sizes, max_rows, alignment, width, dtype, implementation):
    x = _rows(1, (max_rows, 2 * width), dtype)
    tokens = ContiguousTokens(x, jnp.asarray(sizes, jnp.int32), alignment)
    y = silu_and_mul(tokens, implementation=implementation)
    assert y.x.shape == (max_rows, width)
    np.testing.assert_array_equal(y.group_sizes, tokens.group_sizes)
    for start, size in zip(np.asarray(tokens.group_starts), sizes, strict=True):
        owned = slice(start, min(start + size, max_rows))
        _check(y.x[owned], _want(x)[owned], dtype)


@all_implementations
@all_dtypes
@pytest.mark.parametrize("counts", [[0, 0], [3, 0], [6, 1], [7, 6]])
def test_masked(counts, dtype, implementation):
    x = _rows(2, (2, 6, 40), dtype)
    y = silu_and_mul(MaskedTokens(x, jnp.asarray(counts, jnp.int32)), implementation=implementation)
    for group, count in enumerate(counts):
        _check(y.x[group, :count], _want(x)[group, :count], dtype)


@all_implementations
def test_the_whole_range(implementation):
    gate = np.concatenate([np.linspace(-120, 120, 4001), [0.0, -0.0, 1e-30, 3e38, -3e38]])
    x = jnp.asarray(np.stack([gate, np.ones_like(gate)]).T.reshape(-1, 2), jnp.float32)
    y = silu_and_mul(
        ContiguousTokens(x, jnp.array([len(gate)], jnp.int32)), implementation=implementation
    )
    with np.errstate(over="ignore"):
        want = _want(x)
    np.testing.assert_allclose(y.x, want, rtol=1e-6, atol=1e-35)
    x = jnp.array([[np.nan, 1.0], [1.0, np.nan], [np.inf, 1.0]], jnp.float32)
    y = silu_and_mul(ContiguousTokens(x, jnp.array([3], jnp.int32)), implementation=implementation)
    assert jnp.isnan(y.x[:2]).all()
    assert y.x[2, 0] == jnp.inf


def test_many_blocks_are_as_one():
    x = _rows(3, (700, 2 * 256), jnp.float32)
    run = functools.partial(silu_and_mul, implementation="cpu")
    large = run(ContiguousTokens(x, jnp.array([300, 400], jnp.int32))).x
    _check(large, _want(x), jnp.float32)
    assert bool((run(ContiguousTokens(x[:3], jnp.array([3], jnp.int32))).x == large[:3]).all())


def test_errors():
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match="gate and up side by side"):
        silu_and_mul(ContiguousTokens(x[:, :7], jnp.array([1], jnp.int32)))
    with pytest.raises(ValueError, match="one int32 for each group"):
        silu_and_mul(MaskedTokens(jnp.ones((2, 4, 8)), jnp.array([1], jnp.int32)))
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        silu_and_mul(ContiguousTokens(x.astype(jnp.float16), jnp.array([1], jnp.int32)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"group_sizes.* must not be negative"):
        tokens = ContiguousTokens(x, jnp.array([-1], jnp.int32))
        silu_and_mul(tokens, implementation="cpu").x.block_until_ready()


@all_implementations
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = _rows(4, (8 * 2, 30, 64), jnp.float32)
    counts = jnp.full((16,), 30, jnp.int32)
    spec = MaskedTokens(P("x"), P("x"))
    run = jax.shard_map(
        functools.partial(activation.silu_and_mul, implementation=implementation),
        mesh=mesh,
        in_specs=(spec,),
        out_specs=spec,
        check_vma=check_vma,
    )
    _check(jax.jit(run)(MaskedTokens(x, counts)).x, _want(x), jnp.float32)
