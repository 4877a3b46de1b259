"""Offline inference: many prompts at once, as `jaxmoe.generate(...)` and `jaxmoe generate`.

`OfflineEngine` holds a loaded model for repeated calls; `generate` loads one for a single call.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxmoe.assets import EMBEDDED_MODEL
from jaxmoe.offline.engine import OfflineEngine
from jaxmoe.offline.options import Generation, GenerationOptions


__all__ = ["Generation", "GenerationOptions", "OfflineEngine", "generate"]


def generate(
    model_path: Path | str | None,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    ep_size: int | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    batch_size: int = 32,
    deepep_mode: str = "auto",
    moe_a2a_backend: str = "reference",
    two_batch_overlap: bool = False,
    single_batch_overlap: bool = False,
) -> list[Generation]:
    """Continue each prompt, a text or its token ids; results in the order of the prompts.

    `model_path` None is the embedded model, `ep_size` None all devices. The other arguments are
    those of `GenerationOptions` and `OfflineEngine.load`. Raises ValueError naming the first prompt
    that cannot be run, before any has been.
    """
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=ignore_eos,
    )
    engine = OfflineEngine.load(
        EMBEDDED_MODEL if model_path is None else model_path,
        ep_size=ep_size,
        dtype=dtype,
        quantization=quantization,
        batch_size=batch_size,
        deepep_mode=deepep_mode,
        moe_a2a_backend=moe_a2a_backend,
        two_batch_overlap=two_batch_overlap,
        single_batch_overlap=single_batch_overlap,
    )
    return engine.generate(prompts, options)
