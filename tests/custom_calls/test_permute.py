import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls import permute
from custom_calls.layouts import ContiguousTokens, MaskedTokens


IMPLEMENTATIONS = [
    "reference",
    "cpu",
    "triton_interpreted",
    pytest.param("triton", marks=pytest.mark.gpu),
]
TOLERANCES = {
    jnp.float32: {"rtol": 1e-6, "atol": 1e-6},
    jnp.bfloat16: {"rtol": 8e-3, "atol": 1e-2},
}
NUM_GROUPS = 4

permute_contiguous = jax.jit(
    permute.permute_contiguous,
    static_argnames=("num_groups", "max_rows", "alignment", "implementation"),
)
permute_masked = jax.jit(
    permute.permute_masked, static_argnames=("num_groups", "capacity", "implementation")
)
unpermute = jax.jit(permute.unpermute, static_argnames="implementation")

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
all_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=lambda d: d.__name__)


def _random_idx(seed, num_tokens=23, top_k=3):
    rng = np.random.default_rng(seed)
    return rng.integers(-1, NUM_GROUPS, (num_tokens, top_k)).astype(np.int32)


GROUP_IDX = {
    "no_tokens": np.zeros((0, 2), np.int32),
    "no_copies": np.zeros((5, 0), np.int32),
    "nowhere": np.full((6, 2), -1, np.int32),
    "one_group_takes_all": np.full((6, 2), 2, np.int32),
    "empty_groups": np.array([[3, 1], [1, 3], [3, 3]], np.int32),
    "out_of_range": np.array([[4, 1], [-7, 2**31 - 1], [0, -(2**31)]], np.int32),
    "random": _random_idx(0),
    "all_groups": np.abs(_random_idx(1, 64, 2)),
}


def _normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _members(group_idx, num_groups=NUM_GROUPS):
    """The (t, k) copies of each group, in order."""
    return [list(zip(*np.nonzero(group_idx == g), strict=True)) for g in range(num_groups)]


def _contiguous_oracle(group_idx, max_rows, alignment, num_groups=NUM_GROUPS):
    row_of = np.full(group_idx.shape, -1, np.int32)
    start = 0
    for members in _members(group_idx, num_groups):
        for position, (t, k) in enumerate(members):
            if start + position < max_rows:
                row_of[t, k] = start + position
        start += -(-len(members) // alignment) * alignment
    return row_of


def _masked_oracle(group_idx, capacity, num_groups=NUM_GROUPS):
    row_of = np.full(group_idx.shape, -1, np.int32)
    for group, members in enumerate(_members(group_idx, num_groups)):
        for position, (t, k) in enumerate(members[:capacity]):
            row_of[t, k] = group * capacity + position
    return row_of


def _check_rows(x, rows, row_of):
    assert rows.dtype == x.dtype
    rows, x = np.asarray(rows), np.asarray(x)
    for t, k in zip(*np.nonzero(row_of >= 0), strict=True):
        np.testing.assert_array_equal(rows[row_of[t, k]], x[t], err_msg=f"copy {t, k}")


def _unpermute_oracle(rows, row_of, weights):
    rows = np.asarray(rows.astype(jnp.float32), np.float64)
    y = np.zeros((row_of.shape[0], rows.shape[1]))
    for t, k in zip(*np.nonzero((row_of >= 0) & (row_of < len(rows))), strict=True):
        y[t] += float(weights[t, k]) * rows[row_of[t, k]]
    return y


@all_implementations
@pytest.mark.parametrize(
    ("case", "alignment"),
    [(case, 1) for case in GROUP_IDX]
    + [(case, 8) for case in ("no_tokens", "empty_groups", "out_of_range", "random", "all_groups")],
)
def test_contiguous(case, alignment, implementation):
    group_idx = GROUP_IDX[case]
    x = _normal(1, (group_idx.shape[0], 20))
    max_rows = group_idx.size + NUM_GROUPS * (alignment - 1)
    tokens, row_of = permute_contiguous(
        x,
        jnp.asarray(group_idx),
        num_groups=NUM_GROUPS,
        max_rows=max_rows,
        alignment=alignment,
        implementation=implementation,
    )
    assert isinstance(tokens, ContiguousTokens)
    assert tokens.x.shape == (max_rows, 20)
    assert tokens.alignment == alignment
    sizes = [len(members) for members in _members(group_idx)]
    np.testing.assert_array_equal(tokens.group_sizes, np.array(sizes, np.int32), strict=True)
    expected = _contiguous_oracle(group_idx, max_rows, alignment)
    np.testing.assert_array_equal(row_of, expected, strict=True)
    _check_rows(x, tokens.x, np.asarray(row_of))
    for group, members in enumerate(_members(group_idx)):
        for t, k in members[:1]:
            assert row_of[t, k] == tokens.group_starts[group]


@all_implementations
@pytest.mark.parametrize(
    ("case", "capacity"),
    [(case, 3) for case in GROUP_IDX]
    + [(case, 64) for case in ("no_copies", "out_of_range", "random", "all_groups")]
    + [(case, 0) for case in ("no_tokens", "random")],
)
def test_masked(case, capacity, implementation):
    group_idx = GROUP_IDX[case]
    x = _normal(2, (group_idx.shape[0], 20))
    tokens, row_of = permute_masked(
        x,
        jnp.asarray(group_idx),
        num_groups=NUM_GROUPS,
        capacity=capacity,
        implementation=implementation,
    )
    assert isinstance(tokens, MaskedTokens)
    assert tokens.x.shape == (NUM_GROUPS, capacity, 20)
    counts = [len(members) for members in _members(group_idx)]
    np.testing.assert_array_equal(tokens.counts, np.array(counts, np.int32), strict=True)
    np.testing.assert_array_equal(row_of, _masked_oracle(group_idx, capacity), strict=True)
    _check_rows(x, tokens.x.reshape(-1, 20), np.asarray(row_of))


@all_implementations
@pytest.mark.parametrize("excess", [0, 1, 5])
def test_rows_that_do_not_fit(excess, implementation):
    group_idx = np.abs(GROUP_IDX["random"])
    max_rows = group_idx.size - excess
    x = _normal(3, (group_idx.shape[0], 8))
    tokens, row_of = permute_contiguous(
        x,
        jnp.asarray(group_idx),
        num_groups=NUM_GROUPS,
        max_rows=max_rows,
        implementation=implementation,
    )
    row_of = np.asarray(row_of)
    np.testing.assert_array_equal(row_of, _contiguous_oracle(group_idx, max_rows, 1))
    assert (row_of == -1).sum() == excess
    assert int(tokens.group_sizes.sum()) == group_idx.size
    _check_rows(x, tokens.x, row_of)


@all_implementations
@pytest.mark.parametrize("num_groups", [3, 600])
def test_more_copies_than_a_program_sorts(num_groups, implementation, monkeypatch):
    if implementation == "triton":
        monkeypatch.setattr("custom_calls.permute.triton.MAX_BLOCKS", 3)
    rng = np.random.default_rng(14)
    group_idx = jnp.asarray(rng.integers(-1, num_groups + 1, (331, 3)), jnp.int32)
    x = jnp.ones((331, 0), jnp.bfloat16)
    contiguous, row_of = permute_contiguous(
        x,
        group_idx,
        num_groups=num_groups,
        max_rows=900,
        alignment=16,
        implementation=implementation,
    )
    masked, row_of_masked = permute_masked(
        x, group_idx, num_groups=num_groups, capacity=300, implementation=implementation
    )
    expected = _contiguous_oracle(np.asarray(group_idx), 900, 16, num_groups)
    np.testing.assert_array_equal(row_of, expected)
    expected = _masked_oracle(np.asarray(group_idx), 300, num_groups)
    np.testing.assert_array_equal(row_of_masked, expected)
    sizes = np.bincount(np.asarray(group_idx).reshape(-1) + 1, minlength=num_groups + 2)[1:-1]
    np.testing.assert_array_equal(contiguous.group_sizes, sizes)
    np.testing.assert_array_equal(masked.counts, sizes)


@all_implementations
def test_one_past_capacity(implementation):
    group_idx = jnp.array([[0], [0], [0], [1], [1]], jnp.int32)
    tokens, row_of = permute_masked(
        _normal(4, (5, 8)), group_idx, num_groups=2, capacity=2, implementation=implementation
    )
    np.testing.assert_array_equal(row_of[:, 0], [0, 1, -1, 2, 3])
    np.testing.assert_array_equal(tokens.counts, [3, 2])


@all_implementations
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32])
def test_any_dtype_of_whole_bytes_travels(dtype, implementation):
    x = jnp.arange(23 * 7).reshape(23, 7).astype(dtype)
    tokens, row_of = permute_masked(
        x,
        jnp.asarray(GROUP_IDX["random"]),
        num_groups=NUM_GROUPS,
        capacity=64,
        implementation=implementation,
    )
    _check_rows(x, tokens.x.reshape(-1, 7), np.asarray(row_of))


@all_implementations
@all_dtypes
@pytest.mark.parametrize(
    ("hidden", "has_weights"),
    [(0, True), (1, False), (20, True), (1029, False), (1029, True)],
)
def test_unpermute(has_weights, hidden, dtype, implementation):
    num_rows = 12
    rows = np.array(_normal(5, (num_rows, hidden)))
    rows[::3] = np.nan
    rows = jnp.asarray(rows, dtype)
    row_of = np.random.default_rng(6).integers(-1, num_rows, (17, 4)).astype(np.int32)
    row_of[row_of % 3 == 0] = -1
    row_of[0] = -1
    row_of[1, :2] = [num_rows, -(2**31)]
    weights = np.random.default_rng(7).random(row_of.shape, np.float32)
    # A weight of a copy that went nowhere is not looked at either.
    weights[row_of < 0] = np.nan
    y = unpermute(
        rows,
        jnp.asarray(row_of),
        jnp.asarray(weights) if has_weights else None,
        implementation=implementation,
    )
    assert y.dtype == dtype
    expected = _unpermute_oracle(rows, row_of, weights if has_weights else np.ones_like(weights))
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, **TOLERANCES[dtype])


@all_implementations
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_unpermute_of_nothing(shape, implementation):
    num_rows, num_tokens, top_k = shape
    row_of = jnp.zeros((num_tokens, top_k), jnp.int32)
    y = unpermute(jnp.ones((num_rows, 5)), row_of, None, implementation=implementation)
    np.testing.assert_array_equal(y, np.zeros((num_tokens, 5), np.float32), strict=True)


@all_implementations
def test_sum_runs_in_float32_in_the_order_of_k(implementation):
    rows = jnp.array([[1.0], [2.0**-24], [-1.0]])
    row_of = jnp.array([[0, 1, 2], [0, 2, 1]], jnp.int32)
    y = unpermute(rows, row_of, None, implementation=implementation)
    np.testing.assert_array_equal(y[:, 0], np.array([0.0, 2.0**-24], np.float32))


@all_implementations
@all_dtypes
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("num_tokens", [40, 700])
def test_there_and_back(num_tokens, layout, dtype, implementation):
    if num_tokens > 100 and jax.config.jax_disable_jit:
        pytest.skip("interpreted programs run one by one")
    x = _normal(8, (num_tokens, 512), dtype)
    group_idx = jnp.asarray(np.abs(_random_idx(9, num_tokens)))
    weights = np.random.default_rng(10).random(group_idx.shape, np.float32)
    weights = jnp.asarray(weights / weights.sum(1, keepdims=True))
    there = {
        "contiguous": functools.partial(permute_contiguous, max_rows=group_idx.size),
        "masked": functools.partial(permute_masked, capacity=group_idx.size),
    }[layout]
    tokens, row_of = there(x, group_idx, num_groups=NUM_GROUPS, implementation=implementation)
    y = unpermute(tokens.x.reshape(-1, 512), row_of, weights, implementation=implementation)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), np.asarray(x, np.float64), **TOLERANCES[dtype]
    )


def test_best_on_cpu_is_the_handler():
    def there_and_back(x, group_idx):
        tokens, row_of = permute_contiguous(x, group_idx, num_groups=2, max_rows=8)
        return unpermute(tokens.x, row_of, None)

    compiled = jax.jit(there_and_back).lower(jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32))
    hlo = compiled.compile().as_text()
    assert "jaxmoe_cpu_permute_contiguous" in hlo
    assert "jaxmoe_cpu_unpermute" in hlo


def test_bad_arguments():
    x = jnp.ones((4, 8))
    group_idx = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"max_rows \(-1\) must not be negative"):
        permute_contiguous(x, group_idx, num_groups=2, max_rows=-1)
    with pytest.raises(ValueError, match=r"num_groups \(-1\) and capacity \(4\)"):
        permute_masked(x, group_idx, num_groups=-1, capacity=4)
    with pytest.raises(ValueError, match="alignment must be positive, got 0"):
        permute_contiguous(x, group_idx, num_groups=2, max_rows=8, alignment=0)
    with pytest.raises(ValueError, match="4294967296 rows do not fit int32"):
        permute_masked(x, group_idx, num_groups=2**16, capacity=2**16)


# Not interpreted: that runs one operation after the other, outside of any program.
@pytest.mark.parametrize(
    "implementation",
    [name for name in IMPLEMENTATIONS if name != "triton_interpreted"],
    indirect=True,
)
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    mesh = jax.make_mesh((min(8, jax.device_count()),), ("x",), axis_types=(AxisType.Auto,))

    def there_and_back(x, group_idx):
        tokens, row_of = permute_contiguous(
            x,
            group_idx,
            num_groups=NUM_GROUPS,
            max_rows=group_idx.size,
            implementation=implementation,
        )
        y = unpermute(tokens.x, row_of, None, implementation=implementation)
        blocks, row_of = permute_masked(
            x,
            group_idx,
            num_groups=NUM_GROUPS,
            capacity=group_idx.size,
            implementation=implementation,
        )
        rows = blocks.x.reshape(-1, x.shape[1])
        return y - unpermute(rows, row_of, None, implementation=implementation), y

    run = jax.jit(
        jax.shard_map(
            there_and_back,
            mesh=mesh,
            in_specs=(P("x"), P("x")),
            out_specs=P("x"),
            check_vma=check_vma,
        )
    )
    x = _normal(11, (8 * 150, 512))
    group_idx = _random_idx(12, 8 * 150)
    for _ in range(5):
        difference, y = run(x, jnp.asarray(group_idx))
    np.testing.assert_array_equal(difference, 0.0)
    num_copies = (group_idx >= 0).sum(1, keepdims=True)
    np.testing.assert_allclose(y, num_copies * np.asarray(x), **TOLERANCES[jnp.float32])
