"""FP8 from wider numbers, of tokens in either layout or rows of none. Shapes are local.

Every 128 numbers of a row share one scale, `largest / 448`, and become `x * (448 / largest)`
rounded to the nearest float8_e4m3fn, ties to even (DeepSeek-V3, arXiv:2412.19437, section 3.3).
`largest` is at least 1e-12. The last numbers of a row may be fewer than 128.
"""

from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from custom_calls import triton_library
from custom_calls.layouts import ContiguousTokens, MaskedTokens, QuantizedRows
from custom_calls.quantize import reference
from custom_calls.select import Implementation, select


Tokens = TypeVar("Tokens", ContiguousTokens, MaskedTokens)

_QUANTIZE_ROWS = {
    "triton": triton_library.implementation("custom_calls.quantize.triton", "quantize_rows"),
    "reference": Implementation(reference.quantize_rows),
}
_QUANTIZE = {
    "triton": triton_library.implementation("custom_calls.quantize.triton", "quantize"),
    "reference": Implementation(reference.quantize),
}
_SILU_AND_MUL_QUANTIZE = {
    "triton": triton_library.implementation(
        "custom_calls.quantize.triton", "silu_and_mul_quantize"
    ),
    "reference": Implementation(reference.silu_and_mul_quantize),
}


def quantize_rows(x: Float[Array, "M K"], *, implementation: str | None = None) -> QuantizedRows:
    """The rows of x, bfloat16 or float32, in FP8. Raises ValueError for other dtypes or ranks."""
    if x.ndim != 2:
        raise ValueError(f"x must be [M, K], got {x.shape}")
    _check_dtype(x)
    return select("quantize_rows", _QUANTIZE_ROWS, implementation)(x)


def quantize(tokens: Tokens, *, implementation: str | None = None) -> Tokens:
    """The tokens, bfloat16 or float32, in FP8 with their scales; sizes and counts pass through.

    Rows of no group are unspecified in the result too, values and scales. Raises ValueError when
    dtypes or shapes do not fit.
    """
    _check_tokens(tokens, 1)
    return select(f"quantize({type(tokens).__name__})", _QUANTIZE, implementation)(tokens)


def silu_and_mul_quantize(tokens: Tokens, *, implementation: str | None = None) -> Tokens:
    """`quantize(silu_and_mul(tokens))` in one pass over x [.., 2F], gate before up.

    The product is rounded to the dtype of x before it is quantised, as the two ops do one after
    the other. Raises ValueError when dtypes or shapes do not fit.
    """
    _check_tokens(tokens, 2)
    name = f"silu_and_mul_quantize({type(tokens).__name__})"
    return select(name, _SILU_AND_MUL_QUANTIZE, implementation)(tokens)


def _check_tokens(tokens: ContiguousTokens | MaskedTokens, parts: int) -> None:
    is_contiguous = isinstance(tokens, ContiguousTokens)
    rank, sizes = (2, tokens.group_sizes) if is_contiguous else (3, tokens.counts)
    x = tokens.x
    if x.ndim != rank or x.shape[-1] % parts:
        dims = "[M, H]" if is_contiguous else "[e, C, H]"
        raise ValueError(f"x must be {dims}, H a multiple of {parts}, got {x.shape}")
    _check_dtype(x)
    if sizes.ndim != 1 or sizes.dtype != jnp.int32 or (rank == 3 and sizes.shape != x.shape[:1]):
        raise ValueError(
            f"there must be one int32 for each group, got {sizes.dtype}{list(sizes.shape)}"
        )


def _check_dtype(x: Array) -> None:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
