"""What both implementations record about one prompt, so that they can be compared."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Trace:
    """A prompt and the greedy tokens that followed it.

    The rows of the arrays are positions: the prompt's tokens, then each generated token that was
    fed back, which is all but the last.

    Attributes:
      num_prompt_tokens: how many of the rows prefill computed.
      fed: the tokens of all rows.
      hidden: the residual stream after each decoder layer, float32 [rows, H].
      topk_idx: the experts of each MoE layer, [rows, K], in any order.
      logits: float32 [rows, V].
    """

    num_prompt_tokens: int
    fed: np.ndarray
    hidden: tuple[np.ndarray, ...]
    topk_idx: tuple[np.ndarray, ...]
    logits: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """The most likely token after the prompt and after each token fed back."""
        return self.logits[self.num_prompt_tokens - 1 :].argmax(-1)
