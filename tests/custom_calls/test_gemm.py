import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls import gemm as ops


IMPLEMENTATIONS = ["reference", "cpu"]
TOLERANCES = {
    jnp.float32: {"rtol": 1e-5, "atol": 1e-4},
    jnp.bfloat16: {"rtol": 8e-3, "atol": 1e-2},
}

gemm = jax.jit(ops.gemm, static_argnames=("dtype", "implementation"))
gemm_by_head = jax.jit(ops.gemm_by_head, static_argnames=("rows", "transposed", "implementation"))

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)


def _normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


SIZES = [
    (0, 4, 8),
    (3, 0, 8),
    (3, 4, 0),
    (1, 1, 1),
    (2, 3, 15),
    (5, 7, 33),
    (4, 64, 256),
    (130, 70, 100),
    (200, 300, 257),
]


@all_implementations
@all_dtypes
@pytest.mark.parametrize("num_rows, num_out, depth", SIZES)
def test_gemm(num_rows, num_out, depth, dtype, implementation):
    x, weight = _normal(1, (num_rows, depth), dtype), _normal(2, (num_out, depth), dtype)
    want = _float64(x) @ _float64(weight).T
    y = gemm(x, weight, implementation=implementation)
    assert y.dtype == dtype
    np.testing.assert_allclose(_float64(y), want, **TOLERANCES[dtype])
    wide = gemm(x, weight, dtype=jnp.float32, implementation=implementation)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, want, **TOLERANCES[jnp.float32])


@all_implementations
@all_dtypes
@pytest.mark.parametrize(
    "num_tokens, heads, total, rows, width",
    [
        *[(num_tokens, 3, 7, (2, 7), 5) for num_tokens in (0, 1, 3, 4)],
        *[(num_tokens, 4, 96, (0, 64), 80) for num_tokens in (1, 3, 37)],
        *[(num_tokens, 1, 1, (0, 1), 1) for num_tokens in (1, 4)],
        (3, 2, 6, (3, 3), 4),
    ],
)
def test_gemm_by_head(num_tokens, heads, total, rows, width, dtype, implementation):
    weight = _normal(3, (heads, total, width), dtype)
    part = _float64(weight)[:, slice(*rows)]
    run = functools.partial(gemm_by_head, rows=rows, implementation=implementation)

    x = _normal(4, (num_tokens, heads, width), dtype)
    y = run(x, weight)
    assert y.shape == (num_tokens, heads, rows[1] - rows[0])
    assert y.dtype == dtype
    want = np.einsum("tnk,nok->tno", _float64(x), part)
    np.testing.assert_allclose(_float64(y), want, **TOLERANCES[dtype])

    x = _normal(5, (num_tokens, heads, rows[1] - rows[0]), dtype)
    y = run(x, weight, transposed=True)
    assert y.shape == (num_tokens, heads, width)
    want = np.einsum("tnk,nko->tno", _float64(x), part)
    np.testing.assert_allclose(_float64(y), want, **TOLERANCES[dtype])


@all_dtypes
def test_a_row_depends_on_itself_alone(dtype):
    """Any number of rows, blocks and threads gives the same bits."""
    x, weight = _normal(6, (230, 300), dtype), _normal(7, (131, 300), dtype)
    # numpy: JAX would compile every slice and comparison.
    x = np.asarray(x)
    large = np.asarray(gemm(x, weight, implementation="cpu"))
    for size in (1, 2, 3, 4, 5, 13):
        for rows in (slice(size), slice(-size, None)):
            part = gemm(x[rows], weight, implementation="cpu")
            assert (np.asarray(part) == large[rows]).all()
    heads = x.reshape(230, 3, 100)
    weight = _normal(8, (3, 100, 77), dtype)
    run = functools.partial(gemm_by_head, rows=(0, 100), transposed=True, implementation="cpu")
    large = np.asarray(run(heads, weight))
    for size in (1, 2, 3, 5):
        assert (np.asarray(run(heads[:size], weight)) == large[:size]).all()


def test_best_on_cpu_is_the_handler():
    compiled = gemm.lower(jnp.ones((2, 8)), jnp.ones((4, 8))).compile()
    assert "jaxmoe_cpu_gemm" in compiled.as_text()


def test_bad_arguments():
    x, weight = jnp.ones((2, 8)), jnp.ones((4, 8))
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        gemm(x, weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="dtype must be float32 or that of x"):
        gemm(x, weight, dtype=jnp.bfloat16)
    heads, weights = jnp.ones((2, 3, 8)), jnp.ones((3, 4, 8))
    with pytest.raises(ValueError, match=r"rows \(2, 5\) must lie within the 4 rows"):
        gemm_by_head(heads, weights, rows=(2, 5))
    with pytest.raises(ValueError, match="must have depth 2"):
        gemm_by_head(heads, weights, rows=(1, 3), transposed=True)


@all_implementations
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, weight = _normal(9, (8 * 60, 96)), _normal(10, (200, 96))
    run = jax.jit(
        jax.shard_map(
            functools.partial(ops.gemm, implementation=implementation),
            mesh=mesh,
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            check_vma=check_vma,
        )
    )
    for _ in range(3):
        y = run(x, weight)
    np.testing.assert_allclose(y, _float64(x) @ _float64(weight).T, **TOLERANCES[jnp.float32])
