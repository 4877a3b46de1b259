"""Multi-head latent attention over pages. Shapes are local.

A request's result does not depend on what else is in the batch, and an entry that a token does not
attend to never reaches its result, NaN included.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from custom_calls import cpu_library
from custom_calls.attention import cpu, reference
from custom_calls.select import Implementation, select


_PREFILL = {
    "cpu": Implementation(cpu.mla_prefill, "cpu", cpu_library.missing),
    "reference": Implementation(reference.mla_prefill),
}
_DECODE = {
    "cpu": Implementation(cpu.mla_decode, "cpu", cpu_library.missing),
    "reference": Implementation(reference.mla_decode),
}


def mla_prefill(
    q_nope: Float[Array, "T N nope"],
    q_rope: Float[Array, "T N rope"],
    pages: Float[Array, "pages page_size latent"],
    w_key: Float[Array, "N nope rank"],
    w_value: Float[Array, "N v rank"],
    *,
    positions: Int32[Array, " T"],
    request: Int32[Array, " T"],
    page_ids: Int32[Array, " W"],
    page_request: Int32[Array, " W"],
    page_start: Int32[Array, " W"],
    num_pages: Int32[Array, ""],
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "T N v"]:
    """Causal attention of tokens to the pages of their own request, keys and values expanded.

    Token t attends to position p of a page when `request[t]` owns the page and p <= positions[t];
    a token of request -1 attends to nothing and gets zeros. Page w holds positions
    `page_start[w] + arange(page_size)`. Pages past `num_pages` are not read.

    Queries, pages and weights share one dtype, float32 or bfloat16, which is also that of the
    result. Raises ValueError when shapes or dtypes do not fit; a page that the pool does not have
    is an error of the "cpu" call.
    """
    rank = pages.shape[-1] - q_rope.shape[-1]
    expected = {
        "q_rope": (q_rope, (*q_nope.shape[:2], q_rope.shape[-1])),
        "w_key": (w_key, (q_nope.shape[1], q_nope.shape[2], rank)),
        "w_value": (w_value, (q_nope.shape[1], w_value.shape[1], rank)),
        "positions": (positions, q_nope.shape[:1]),
        "request": (request, q_nope.shape[:1]),
        "page_request": (page_request, page_ids.shape),
        "page_start": (page_start, page_ids.shape),
        "num_pages": (num_pages, ()),
    }
    _check_shapes("q_nope", q_nope, pages, expected)
    _check_dtypes(q_nope, q_rope, pages, w_key, w_value)
    return select("mla_prefill", _PREFILL, implementation)(
        q_nope,
        q_rope,
        pages,
        w_key,
        w_value,
        positions=positions,
        request=request,
        page_ids=page_ids,
        page_request=page_request,
        page_start=page_start,
        num_pages=num_pages,
        scale=scale,
    )


def mla_decode(
    q_latent: Float[Array, "B N rank"],
    q_rope: Float[Array, "B N rope"],
    pages: Float[Array, "pages page_size latent"],
    *,
    page_table: Int32[Array, "B W"],
    lengths: Int32[Array, " B"],
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "B N rank"]:
    """Attention of one token a request to the first `lengths` cached latents of its pages.

    The query is absorbed: its score with a latent is its score with the expanded key. The result
    is the attended latent, still to be expanded into values. Length 0 gives zeros.

    Queries and pages share one dtype, float32 or bfloat16, which is also that of the result. Raises
    ValueError when shapes or dtypes do not fit; a length that the page table has no room for, or a
    page that the pool does not have, is an error of the "cpu" call.
    """
    expected = {
        "q_rope": (q_rope, (*q_latent.shape[:2], pages.shape[-1] - q_latent.shape[-1])),
        "page_table": (page_table, (q_latent.shape[0], page_table.shape[-1])),
        "lengths": (lengths, q_latent.shape[:1]),
    }
    _check_shapes("q_latent", q_latent, pages, expected)
    _check_dtypes(q_latent, q_rope, pages)
    return select("mla_decode", _DECODE, implementation)(
        q_latent, q_rope, pages, page_table=page_table, lengths=lengths, scale=scale
    )


def _check_shapes(name: str, q: Array, pages: Array, expected: dict) -> None:
    for what, (array, shape) in expected.items():
        if array.shape != tuple(shape):
            raise ValueError(
                f"{what} must have shape {tuple(shape)} beside {name} {q.shape} and pages "
                f"{pages.shape}, got {array.shape}"
            )


def _check_dtypes(*arrays: Array) -> None:
    dtypes = [str(array.dtype) for array in arrays]
    if len(set(dtypes)) > 1 or arrays[0].dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"queries, pages and weights must all be float32 or all bfloat16, got {dtypes}"
        )
