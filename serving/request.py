"""A request, from the door to its last token.

A request is one sequence. What a client asks for with `n` or a list of prompts is several of them.
`Request.sink` receives an `Output` for each step that produced tokens, the last one with a
`finish_reason`; it is called on the serving loop's thread and must not block.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, runtime_checkable

import jax
from jaxtyping import Float


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends, already validated.

    Attributes:
      max_new_tokens: most tokens generated, at least 0 (0 only scores the prompt).
      temperature: 0 takes the most likely token.
      top_k: 0 keeps all tokens.
      seed: any 64-bit unsigned integer; the same seed gives the same tokens.
      stop: strings that end the output; the first one found and what follows it are not returned.
      stop_token_ids: tokens that end the output, in addition to the model's end tokens.
      ignore_eos: go on past the model's end tokens.
      frequency_penalty, presence_penalty: subtracted from the logits of generated tokens, the first
        once for each occurrence.
      logit_bias: added to the logits of these tokens.
      logprobs: return the log-probability of each generated token.
      num_top_logprobs: and of this many most likely ones, at most `MAX_TOP_LOGPROBS`.
      prompt_logprobs: also return those of the prompt's tokens,
      prompt_logprobs_start: from this one on.
    """

    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: bool = False
    num_top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_logprobs_start: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def edits_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability (None for a prompt's first token) and the likeliest ones."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """What one step added to a request.

    Attributes:
      text: new text, whole characters only; "" while a character or a possible stop string is open.
      token_ids: the new tokens, including one that ended the request.
      logprobs: one for each new token, if asked for.
      prompt_logprobs: on a request's first output, if asked for.
      cached_tokens: on a request's first output, how many of the prompt's tokens were not computed
        for it but found in the cache.
      finish_reason: on the last output: "stop" (end token or stop string), "length", "abort" or
        "error".
      matched_stop: the stop string or stop token that ended it.
      error: for "error", what happened in words.
      failed_peer: for "error", the prefill worker at this address could not do its part; another
        one may.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    failed_peer: str | None = None


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    DONE = "done"
    FAILED = "failed"


# A prompt is computed here (PREFILL) or comes from a prefill worker (TRANSFER). A request that
# loses its pages to others (retraction) waits again and gets its latents anew.
_LEGAL = {
    Phase.WAITING: {Phase.PREFILL, Phase.TRANSFER, Phase.DONE, Phase.FAILED},
    Phase.PREFILL: {Phase.DECODE, Phase.WAITING, Phase.DONE, Phase.FAILED},
    Phase.TRANSFER: {Phase.DECODE, Phase.WAITING, Phase.DONE, Phase.FAILED},
    Phase.DECODE: {Phase.WAITING, Phase.DONE, Phase.FAILED},
    Phase.DONE: set(),
    Phase.FAILED: set(),
}


@runtime_checkable
class Incoming(Protocol):
    """The latents of a request on their way into its pages."""

    def cancel(self) -> None:
        """Nothing more is to be written to them."""
        ...


@runtime_checkable
class Outgoing(Protocol):
    """The decode worker that a request's latents and first token go to.

    Attributes:
      num_sent: pages of the request that are there or on their way.
    """

    num_sent: int

    def send(self, count: int, block: Float[jax.Array, "1 n L page_size latent"]) -> None:
        """The next `count` pages, the first ones of `block`."""
        ...

    def finish(
        self,
        request: "Request",
        token: TokenLogprob,
        *,
        queue_seconds: float,
        prefill_seconds: float,
    ) -> None:
        """All pages are sent; this is what comes after them."""
        ...


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence being served.

    Attributes:
      rid: the client's or a generated id, unique among the requests being served.
      prompt_ids: the prompt, at least one token.
      sink: receives the outputs.
      output_ids: tokens generated so far.
      num_computed: tokens whose latents are in the cache.
      rank, pages: where they are; set while the request holds pages.
      num_shared_pages: the first of `pages`, which others may use too; they are only read.
      cached_tokens: tokens found in the cache when it was first admitted, None before that.
      prefill_address: of the worker that computes its prompt, on a decode worker.
      incoming: set while its latents come from there.
      outgoing: where they go, on a prefill worker.
    """

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    sink: Callable[[Output], None]
    output_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    rank: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    num_shared_pages: int = 0
    cached_tokens: int | None = None
    phase: Phase = Phase.WAITING
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prefill_address: str | None = None
    incoming: Incoming | None = None
    outgoing: Outgoing | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def next_prompt_logprob(self) -> int | None:
        """Position of the first prompt token whose log-probability is wanted and not there yet."""
        if not self.params.prompt_logprobs:
            return None
        position = self.params.prompt_logprobs_start + len(self.prompt_logprobs)
        return position if position < len(self.prompt_ids) else None

    @property
    def num_reusable(self) -> int:
        """The first tokens that need not be computed if they are in the cache.

        The last one's state gives the next token, the state before a token its log-probability.
        """
        first = self.next_prompt_logprob
        return self.num_tokens - 1 if first is None else max(0, first - 1)

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens in [start, stop)."""
        split = len(self.prompt_ids)
        generated = slice(max(0, start - split), max(0, stop - split))
        return self.prompt_ids[start:stop] + self.output_ids[generated]

    def move_to(self, phase: Phase) -> None:
        """The one place where a request changes phase."""
        if phase not in _LEGAL[self.phase]:
            raise RuntimeError(f"request {self.rid} cannot go from {self.phase} to {phase}")
        self.phase = phase
