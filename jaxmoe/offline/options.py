"""What is asked for and what comes back: options, one prompt, one generation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, TypeGuard


@dataclasses.dataclass(frozen=True)
class GenerationOptions:
    """How all prompts of a run are continued; `PromptRequest` may override the first three.

    Attributes:
      max_new_tokens: most tokens generated for a prompt.
      temperature: 0 takes the most likely token.
      seed: prompt number i draws from the stream of `seed + i`, whatever batch it is in.
      top_p: keep the fewest most likely tokens whose probabilities reach top_p.
      top_k: keep the k most likely tokens; 0 keeps all.
      min_p: drop tokens less likely than min_p times the most likely.
      stop: strings that end the text; the first one found and what follows are cut off.
      stop_token_ids: tokens that end the text, besides the model's end tokens.
      ignore_eos: go on past the model's end tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_max_new_tokens(self.max_new_tokens)
        check_temperature(self.temperature)
        check_seed(self.seed)
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if not (_is_integer(self.top_k) and 0 <= self.top_k < 2**31):
            raise ValueError(f"top_k must be an integer of at least 0, got {self.top_k!r}")
        if not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        if not all(_is_integer(token) and 0 <= token < 2**31 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, got {self.stop_token_ids!r}")


@dataclasses.dataclass(frozen=True)
class PromptRequest:
    """A prompt that has passed all checks.

    Attributes:
      index: its number in the input, from 0.
      id: what its author calls it, given back unchanged.
    """

    index: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    id: str | int | None = None

    @property
    def num_tokens(self) -> int:
        """The most tokens it can come to."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclasses.dataclass(frozen=True)
class Generation:
    """A prompt's continuation.

    Attributes:
      text: without the end token, or from the stop string on; None if the model has no tokenizer.
      token_ids: up to and including the token that ended it.
      finish_reason: "stop" for an end token or a stop string, "length" for the last token allowed.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


def make_request(
    index: int,
    prompt_ids: Sequence[int],
    options: GenerationOptions,
    *,
    vocab_size: int,
    max_tokens: int,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    id: str | int | None = None,
) -> PromptRequest:
    """Check a prompt and its overrides; what is None comes from the options.

    Raises ValueError with the rule that is broken.
    """
    if not prompt_ids:
        raise ValueError("the prompt must have at least one token")
    for token in prompt_ids:
        if not (_is_integer(token) and 0 <= token < vocab_size):
            raise ValueError(f"token ids must be integers in [0, {vocab_size}), got {token!r}")
    max_new_tokens = options.max_new_tokens if max_new_tokens is None else max_new_tokens
    temperature = options.temperature if temperature is None else temperature
    seed = (options.seed + index) % 2**64 if seed is None else seed
    check_max_new_tokens(max_new_tokens)
    check_temperature(temperature)
    check_seed(seed)
    if len(prompt_ids) + max_new_tokens > max_tokens:
        raise ValueError(
            f"prompt tokens ({len(prompt_ids)}) plus max_new_tokens ({max_new_tokens}) must not "
            f"exceed the model's {max_tokens} positions"
        )
    return PromptRequest(index, tuple(prompt_ids), max_new_tokens, float(temperature), seed, id)


def check_max_new_tokens(value: object) -> None:
    if not (_is_integer(value) and 1 <= value < 2**31):
        raise ValueError(f"max_new_tokens must be a positive integer, got {value!r}")


def check_temperature(value: object) -> None:
    if not (_is_number(value) and 0 <= value < math.inf):
        raise ValueError(f"temperature must be a number of at least 0, got {value!r}")


def check_seed(value: object) -> None:
    if not (_is_integer(value) and 0 <= value < 2**64):
        raise ValueError(f"seed must be an integer in [0, 2**64), got {value!r}")


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
