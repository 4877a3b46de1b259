"""transformers' DeepSeek V2 and V3 on the CPU, eager, one prompt at a time.

torch and transformers are imported when they are used: everything else works without them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.hf import HfCheckpoint, is_mtp, stored_shapes
from jaxmoe.checkpoint.tensor_file import has_tensors
from jaxmoe.config import ModelConfig
from jaxmoe.plan import Quantization
from jaxmoe.reference.trace import Trace


FIRST_TRANSFORMERS = (5, 24)


class ReferenceUnavailableError(ImportError):
    """torch or transformers is not installed, or transformers is too old."""


def load_reference(
    model_dir: Path | str, *, dtype: DTypeLike, quantization: Quantization | None = None
) -> Any:
    """The transformers model of a Hugging Face directory, in `dtype` (routers in float32).

    FP8 weights are dequantised as `load_hf` does it, because transformers needs a GPU for them.
    With a `quantization` others are quantised and dequantised again. Activations never are.

    Raises ReferenceUnavailableError, and CheckpointError when transformers finds tensors missing
    or left over.
    """
    torch, transformers = import_torch()
    model_dir = Path(model_dir)
    if not has_tensors(model_dir):
        raise CheckpointError(
            f"{model_dir} has no safetensors: the PyTorch reference reads Hugging Face "
            "directories only, so compare with the source of a converted checkpoint"
        )
    config = ModelConfig.load(model_dir)
    kind = {
        "deepseek_v2": transformers.DeepseekV2ForCausalLM,
        "deepseek_v3": transformers.DeepseekV3ForCausalLM,
    }[config.model_type]
    torch_dtype = getattr(torch, jnp.dtype(dtype).name)
    options: dict[str, Any] = dict(
        dtype=torch_dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    transformers.utils.logging.disable_progress_bar()
    if config.weight_block_size is None and quantization is None:
        model, info = kind.from_pretrained(model_dir, local_files_only=True, **options)
    else:
        hf_config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
        if hasattr(hf_config, "quantization_config"):
            del hf_config.quantization_config
        state = _dequantised_state(torch, model_dir, quantization)
        model, info = kind.from_pretrained(None, config=hf_config, state_dict=state, **options)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = [n for n in sorted(map(str, info.get(problem, ()))) if not is_mtp(n, config)]
        if names:
            raise CheckpointError(f"transformers reports {problem} in {model_dir}: {names[:5]}")
    return model.eval()


def trace_reference(
    model: Any, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[Trace]:
    """Greedy decoding of each prompt, recorded. An end-of-sequence token does not end it."""
    torch, _ = import_torch()
    with torch.inference_mode():
        return [_trace(model, prompt, max_new_tokens) for prompt in prompts]


def _trace(model: Any, prompt: list[int], max_new_tokens: int) -> Trace:
    torch, transformers = import_torch()
    layers = model.model.layers
    hidden: list[list[np.ndarray]] = [[] for _ in layers]
    gates = [layer.mlp.gate for layer in layers if hasattr(layer.mlp, "gate")]
    topk_idx: list[list[np.ndarray]] = [[] for _ in gates]
    logits: list[np.ndarray] = []

    def record(into: list[np.ndarray], output: Any) -> None:
        into.append(output.reshape(-1, output.shape[-1]).float().numpy())

    handles = [
        layer.register_forward_hook(
            lambda _, __, output, into=into: record(
                into, output[0] if isinstance(output, tuple) else output
            )
        )
        for layer, into in zip(layers, hidden, strict=True)
    ]
    handles += [
        # A gate returns its logits, the weights and the indices.
        gate.register_forward_hook(lambda _, __, output, into=into: into.append(output[2].numpy()))
        for gate, into in zip(gates, topk_idx, strict=True)
    ]
    try:
        cache = transformers.DynamicCache(config=model.config)
        fed, step = list(prompt), list(prompt)
        for remaining in reversed(range(max_new_tokens)):
            output = model(torch.tensor([step]), cache=cache, use_cache=True)
            record(logits, output.logits)
            step = [int(logits[-1][-1].argmax())]
            if remaining:
                fed += step
    finally:
        for handle in handles:
            handle.remove()
    return Trace(
        num_prompt_tokens=len(prompt),
        fed=np.asarray(fed, np.int32),
        hidden=tuple(map(np.concatenate, hidden)),
        topk_idx=tuple(map(np.concatenate, topk_idx)),
        logits=np.concatenate(logits),
    )


def _dequantised_state(
    torch: Any, model_dir: Path, quantization: Quantization | None
) -> dict[str, Any]:
    source = HfCheckpoint.open(model_dir, quantization)
    return {
        name: torch.from_numpy(source.read(name, np.dtype(np.float32)))
        for name in stored_shapes(source.config)
    }


def import_torch() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ReferenceUnavailableError(
            f"the PyTorch reference needs torch and transformers ({error}): "
            "pip install 'jaxmoe[test]'"
        ) from error
    found = tuple(map(int, transformers.__version__.split(".")[:2]))
    if found < FIRST_TRANSFORMERS:
        # Older ones record other hidden states of decoded tokens.
        first = ".".join(map(str, FIRST_TRANSFORMERS))
        raise ReferenceUnavailableError(
            f"the PyTorch reference needs transformers >= {first}, found "
            f"{transformers.__version__}: pip install 'jaxmoe[test]'"
        )
    return torch, transformers
