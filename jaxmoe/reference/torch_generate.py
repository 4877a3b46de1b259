"""Greedy generation in batches by transformers on the CPU: answers to hold ours against.

The weights are read by `HfCheckpoint`, so FP8 ones are dequantised as ours are, and an MTP layer,
which transformers does not know below layer 61, is left out.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from jaxmoe.checkpoint import CheckpointError
from jaxmoe.checkpoint.hf import HfCheckpoint, stored_shapes
from jaxmoe.checkpoint.tensor_file import has_tensors
from jaxmoe.reference.torch_deepseek import import_torch


class TorchGenerator:
    """A loaded model."""

    def __init__(self, model_dir: Path | str, *, dtype: str):
        """`dtype` is "float32" or "bfloat16".

        Raises ReferenceUnavailableError, and CheckpointError for a directory it cannot read.
        """
        torch, transformers = import_torch()
        model_dir = Path(model_dir)
        if not has_tensors(model_dir):
            raise CheckpointError(
                f"{model_dir} has no safetensors: transformers reads Hugging Face directories only"
            )
        source = HfCheckpoint.open(model_dir)
        config = transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        transformers.utils.logging.disable_progress_bar()
        model, info = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict={
                name: torch.from_numpy(source.read(name, np.dtype(np.float32)))
                for name in stored_shapes(source.config)
            },
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        if problems := {name: keys for name, keys in info.items() if keys}:
            raise CheckpointError(f"transformers reports in {model_dir}: {problems!r:.200}")
        # What the checkpoint suggests for sampling has no place here, and would be warned about.
        model.generation_config = transformers.GenerationConfig()
        self._model = model.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        end_ids: Collection[int],
    ) -> list[list[int]]:
        """Each prompt's most likely tokens, up to and including one of `end_ids`."""
        torch, _ = import_torch()
        longest = max(map(len, prompts))
        # Padding is masked, so any token will do.
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        is_token = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(is_token),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(end_ids) or None,
                pad_token_id=0,
            )
        return [_until(row, end_ids) for row in output[:, longest:].tolist()]


def _until(token_ids: list[int], end_ids: Collection[int]) -> list[int]:
    """The batch goes on until all its rows have ended."""
    ends = (index for index, token in enumerate(token_ids, start=1) if token in end_ids)
    return token_ids[: next(ends, len(token_ids))]
