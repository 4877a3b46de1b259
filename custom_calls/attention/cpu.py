"""The ops of `attention` by the C++ handlers, which read the pages where they lie."""

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from custom_calls import cpu_library


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
) -> Float[Array, "T N v"]:
    (values,) = cpu_library.call(
        "jaxmoe_cpu_mla_prefill",
        (jax.ShapeDtypeStruct((*q_nope.shape[:2], w_value.shape[1]), q_nope.dtype),),
        q_nope,
        q_rope,
        pages,
        w_key,
        w_value,
        positions,
        request,
        page_ids,
        page_request,
        page_start,
        num_pages,
        scale=np.float32(scale),
    )
    return values


def mla_decode(
    q_latent: Float[Array, "B N rank"],
    q_rope: Float[Array, "B N rope"],
    pages: Float[Array, "pages page_size latent"],
    *,
    page_table: Int32[Array, "B W"],
    lengths: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B N rank"]:
    (attended,) = cpu_library.call(
        "jaxmoe_cpu_mla_decode",
        (jax.ShapeDtypeStruct(q_latent.shape, q_latent.dtype),),
        q_latent,
        q_rope,
        pages,
        page_table,
        lengths,
        scale=np.float32(scale),
    )
    return attended
