import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from custom_calls import quantize
from custom_calls.activation import silu_and_mul
from custom_calls.layouts import ContiguousTokens, MaskedTokens, num_scale_blocks, num_scale_rows
from custom_calls.quantize import reference


IMPLEMENTATIONS = [
    "reference",
    "triton_interpreted",
    pytest.param("triton", marks=pytest.mark.gpu),
]
FP8 = ml_dtypes.float8_e4m3fn
# The exponential is not rounded the same way everywhere: a product may round to the next number of
# its dtype, and so may a value, or a scale.
SILU_VALUES_THAT_DIFFER = 1e-2
SILU_SCALE_RTOL = {jnp.float32: 1e-6, jnp.bfloat16: 2**-7}

quantize_rows = jax.jit(quantize.quantize_rows, static_argnames="implementation")
quantize_tokens = jax.jit(quantize.quantize, static_argnames="implementation")
silu_and_mul_quantize = jax.jit(quantize.silu_and_mul_quantize, static_argnames="implementation")

all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
all_dtypes = pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__
)


def _numbers(seed, shape, dtype=jnp.float32):
    """Normal numbers in rows of very different magnitudes."""
    rng = np.random.default_rng(seed)
    magnitude = 2.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    return jnp.asarray(rng.standard_normal(shape) * magnitude, dtype)


def _oracle(x):
    """Values and scales [.., M, blocks] from float64, rounded to float32 after each operation."""
    x = np.asarray(x).astype(np.float64)
    values, scales = np.empty(x.shape, FP8), []
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.shape[-1], 128):
            block = x[..., start : start + 128]
            largest = np.maximum(np.abs(block).max(axis=-1), float(np.float32(1e-12)))
            factor = (448 / largest).astype(np.float32).astype(np.float64)
            product = (block * factor[..., None]).astype(np.float32)
            values[..., start : start + 128] = product.astype(FP8)
            scales.append((largest * float(np.float32(1 / 448))).astype(np.float32))
    return values, np.stack(scales, axis=-1)


def _bits(values):
    """Equal for equal numbers, zeros of both signs apart, and for all NaN."""
    bits = np.asarray(values).view(np.uint8)
    return np.where(bits & 0x7F == 0x7F, 0x7F, bits)


def _assert_is_quantized(x, values, scale):
    """Rows x [M, K] became `values` and `scale` [blocks, >= M]."""
    assert values.dtype == FP8
    assert scale.dtype == jnp.float32
    expected_values, expected_scale = _oracle(x)
    np.testing.assert_array_equal(_bits(values), _bits(expected_values))
    np.testing.assert_array_equal(np.asarray(scale)[:, : x.shape[0]], expected_scale.T)


def _masked(x, counts):
    return MaskedTokens(x, jnp.asarray(counts, jnp.int32))


def _contiguous(x, sizes, alignment):
    return ContiguousTokens(x, jnp.asarray(sizes, jnp.int32), alignment)


def _groups(tokens):
    """The rows that each group owns, and their scales if they have any."""
    # numpy: JAX would compile a slice for every size.
    x = np.asarray(tokens.x)
    scale = None if tokens.scale is None else np.asarray(tokens.scale)
    if isinstance(tokens, MaskedTokens):
        counts = np.minimum(tokens.counts, x.shape[1])
        for group, count in enumerate(counts):
            yield x[group, :count], None if scale is None else scale[group, :, :count]
    else:
        for start, size in zip(
            np.asarray(tokens.group_starts), np.asarray(tokens.group_sizes), strict=True
        ):
            stop = min(start + size, x.shape[0])
            yield x[start:stop], None if scale is None else scale[:, start:stop]


TOKENS = {
    "masked": lambda x: _masked(x.reshape(3, -1, x.shape[1]), [0, 5, 23]),
    "masked_past_capacity": lambda x: _masked(x.reshape(3, -1, x.shape[1]), [31, 2**31 - 1, 1]),
    "no_rows": lambda x: _masked(x.reshape(3, -1, x.shape[1]), [0, 0, 0]),
    "contiguous": lambda x: _contiguous(x, [3, 0, 17, 8, 1], 1),
    "aligned": lambda x: _contiguous(x, [0, 9, 1, 0, 16], 16),
    "past_the_bound": lambda x: _contiguous(x, [40, 2, 30, 1000], 8),
    "many_groups": lambda x: _contiguous(x, [1] * 20 + [0] * 20, 2),
}
all_tokens = pytest.mark.parametrize("case", list(TOKENS))
all_tokens_and_dtypes = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, jnp.float32) for case in TOKENS]
    + [(case, jnp.bfloat16) for case in ("masked", "contiguous", "past_the_bound")],
    ids=lambda value: getattr(value, "__name__", value),
)


@all_implementations
@all_dtypes
@pytest.mark.parametrize(("num_rows", "depth"), [(8, 1), (21, 128), (8, 1200), (21, 1200)])
def test_rows(num_rows, depth, dtype, implementation):
    x = _numbers(0, (num_rows, depth), dtype)
    rows = quantize_rows(x, implementation=implementation)
    assert rows.values.shape == (num_rows, depth)
    assert rows.scale.shape == (num_scale_blocks(depth), num_scale_rows(num_rows))
    _assert_is_quantized(x, rows.values, rows.scale)
    np.testing.assert_array_equal(rows.scale[:, num_rows:], 0.0)


@all_implementations
@pytest.mark.parametrize("shape", [(0, 256), (0, 0), (3, 0)])
def test_nothing(shape, implementation):
    if implementation == "reference" and not shape[0]:
        pytest.skip("the reference needs a row")
    rows = quantize_rows(jnp.ones(shape), implementation=implementation)
    assert rows.values.shape == shape
    assert rows.scale.shape == (num_scale_blocks(shape[1]), num_scale_rows(shape[0]))


@all_implementations
@all_dtypes
def test_extremes(dtype, implementation):
    x = np.zeros((8, 256), np.float32)
    x[1, :3] = [3e38, -1.5, 1e30]
    x[2, :3] = [1e-13, -1e-14, 1e-16]  # below the least block maximum
    x[3] = 2.0**-100
    x[4, 7] = np.inf
    x[5, [7, 200]] = [np.nan, 2.0]
    x[6] = -448.0
    x[7, ::2] = 1.0
    x = jnp.asarray(x, dtype)
    rows = quantize_rows(x, implementation=implementation)
    _assert_is_quantized(x, rows.values, rows.scale)
    values = np.asarray(rows.values).astype(np.float32)
    np.testing.assert_array_equal(values[0], 0.0)
    np.testing.assert_array_equal(values[6], -448.0)
    assert np.isnan(values[5, :128]).all()
    assert values[5, 200] == 448.0


@all_implementations
@all_dtypes
def test_every_halfway_rounds_to_even(dtype, implementation):
    numbers = np.sort(np.arange(127, dtype=np.uint8).view(FP8).astype(np.float32))
    x = np.full((2, 256), 448.0, np.float32)
    x[0, 1:127] = (numbers[1:] + numbers[:-1]) / 2
    x[1, 1:127] = -x[0, 1:127]
    x[:, 129:255] = numbers[1:]
    x = jnp.asarray(x, dtype)
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(x.astype(jnp.float32)))
    rows = quantize_rows(x, implementation=implementation)
    assert (np.asarray(rows.scale)[:, :2] == 448 * np.float32(1 / 448)).all()
    np.testing.assert_array_equal(_bits(rows.values), _bits(np.asarray(x).astype(FP8)))


@all_implementations
@all_dtypes
def test_scaled_values_are_near(dtype, implementation):
    x = _numbers(1, (30, 700), dtype)
    rows = quantize_rows(x, implementation=implementation)
    back = np.asarray(reference.dequantize_rows(rows))
    x = np.asarray(x, np.float64)
    for start in range(0, 700, 128):
        block = np.s_[:, start : start + 128]
        largest = np.abs(x[block]).max(axis=1, keepdims=True)
        assert (np.abs(back[block] - x[block]) <= 2.0**-4 * largest * (1 + 1e-6)).all()


@all_implementations
@all_tokens_and_dtypes
def test_tokens(case, dtype, implementation):
    depth = 700  # two column tiles, the last block cut
    tokens = TOKENS[case](_numbers(2, (69, depth), dtype))
    quantized = quantize_tokens(tokens, implementation=implementation)
    assert type(quantized) is type(tokens)
    assert quantized.x.shape == tokens.x.shape
    *groups, num_rows, _ = tokens.x.shape
    assert quantized.scale.shape == (*groups, num_scale_blocks(depth), num_scale_rows(num_rows))
    for (x, _), (values, scale) in zip(_groups(tokens), _groups(quantized), strict=True):
        if x.shape[0]:
            _assert_is_quantized(x, values, scale)


@all_implementations
@all_tokens
def test_rows_of_no_group_change_nothing(case, implementation):
    x = np.array(_numbers(3, (69, 256)))
    clean = quantize_tokens(TOKENS[case](jnp.asarray(x)), implementation=implementation)
    owned = np.zeros(69, bool)
    for rows, _ in _groups(TOKENS[case](np.arange(69, dtype=np.float32)[:, None])):
        owned[rows[:, 0].astype(np.int32)] = True
    x[~owned] = np.nan
    dirty = quantize_tokens(TOKENS[case](jnp.asarray(x)), implementation=implementation)
    for (values, scale), (expected_values, expected_scale) in zip(
        _groups(dirty), _groups(clean), strict=True
    ):
        np.testing.assert_array_equal(_bits(values), _bits(expected_values))
        np.testing.assert_array_equal(scale, expected_scale)


@all_implementations
@all_tokens_and_dtypes
def test_silu_and_mul(case, dtype, implementation):
    depth = 600
    x = np.random.default_rng(4).standard_normal((69, 2 * depth)) * 4
    x[:, :3] = [-200.0, 0.0, 200.0]
    tokens = TOKENS[case](jnp.asarray(x, dtype))
    quantized = silu_and_mul_quantize(tokens, implementation=implementation)
    # On CPU: XLA's division is not rounded correctly on GPUs, and ties of FP8 then fall elsewhere.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        tokens = TOKENS[case](jnp.asarray(x, dtype))
        expected = reference.quantize(silu_and_mul(tokens, implementation="reference"))
    assert quantized.x.shape == expected.x.shape
    assert quantized.scale.shape == expected.scale.shape
    for (values, scale), (expected_values, expected_scale) in zip(
        _groups(quantized), _groups(expected), strict=True
    ):
        np.testing.assert_allclose(scale, expected_scale, rtol=SILU_SCALE_RTOL[dtype])
        values = np.asarray(values).astype(np.float64)
        expected_values = np.asarray(expected_values).astype(np.float64)
        np.testing.assert_allclose(values, expected_values, rtol=2**-3, atol=2**-9)
        # One number that rounds the other way moves its whole block when it is the largest.
        if values.size and np.array_equal(scale, expected_scale):
            assert (values != expected_values).mean() <= SILU_VALUES_THAT_DIFFER


@pytest.mark.parametrize(
    "implementation",
    [name for name in IMPLEMENTATIONS if name != "triton_interpreted"],
    indirect=True,
)
@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma, implementation):
    num_devices = min(8, jax.device_count())
    mesh = jax.make_mesh((num_devices,), ("x",), axis_types=(AxisType.Auto,))

    def run(x, counts):
        rows = quantize.quantize_rows(x, implementation=implementation)
        tokens = silu_and_mul_quantize(MaskedTokens(x[None], counts), implementation=implementation)
        return rows.values, tokens.x

    run = jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P("x"), P("x")),
            out_specs=(P("x"), P("x")),
            check_vma=check_vma,
        )
    )
    x = _numbers(5, (num_devices * 4, 256))
    values, gated = run(x, jnp.full(num_devices, 4, jnp.int32))
    np.testing.assert_array_equal(_bits(values), _bits(_oracle(x)[0]))
    assert gated.shape == (num_devices, 4, 128)


def test_bad_arguments():
    x = jnp.ones((4, 8))
    with pytest.raises(ValueError, match=r"x must be \[M, K\], got \(4, 8, 1\)"):
        quantize.quantize_rows.__wrapped__(x[..., None])
    with pytest.raises(ValueError, match="x must be float32 or bfloat16, got float16"):
        quantize_rows(x.astype(jnp.float16))
    with pytest.raises(ValueError, match="one int32 for each group, got float32"):
        quantize_tokens(ContiguousTokens(x, jnp.ones(2)))
    with pytest.raises(ValueError, match=r"got int32\[3\]"):
        quantize_tokens(MaskedTokens(x[None], jnp.ones(3, jnp.int32)))
    with pytest.raises(ValueError, match="H a multiple of 2"):
        silu_and_mul_quantize(ContiguousTokens(x[:, :7], jnp.ones(2, jnp.int32)))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_without_gpu_triton_raises():
    with pytest.raises(RuntimeError, match=r"'triton' of .* cannot run: it needs 'gpu'"):
        quantize_rows(jnp.ones((4, 8)), implementation="triton")
