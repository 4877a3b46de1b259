"""What clients send: request bodies, their rules, and the way from them to `SamplingParams`.

Types are strict: a number is not a string, a boolean is not a number. A field that is not here is
let through when it is null, listed as changing nothing (`ignored`), or has the value that asks for
nothing special (`neutral`); any other is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from jaxmoe.sampling import MAX_TOP_LOGPROBS
from serving.http.base import read_model
from serving.http.errors import ApiError, invalid, shown
from serving.request import SamplingParams


MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
DEFAULT_GENERATE_TOKENS = 128  # SGLang's
# Below this, logits divided by the temperature leave float32's range; the limit is greedy anyway.
MIN_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What is served and within which limits.

    Attributes:
      context_length: most tokens of a request, prompt and generated.
      max_num_pages_tokens: tokens the cache of one rank holds, if fewer can be: no larger request
        can ever run.
      page_size: tokens of a page of the cache.
    """

    served_model_name: str
    model_path: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    max_num_pages_tokens: int | None = None
    page_size: int | None = None

    @property
    def max_request_tokens(self) -> int:
        return min(self.context_length, self.max_num_pages_tokens or self.context_length)


TextOrIds = str | list[int]


def _check_prompt(value: Any) -> Any:
    """str | list[str] | list[int] | list[list[int]], nothing empty."""
    if value in ("", []):
        raise ValueError("a prompt must not be empty")
    if isinstance(value, str) or _is_ids(value):
        return value
    if isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value)
    ):
        if any(not item for item in value):
            raise ValueError("a prompt must not be empty")
        return value
    raise ValueError("must be a string, a list of token ids, or a list of one of these")


def _is_ids(value: Any) -> bool:
    # `type`, since True is an int.
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a non-empty string or a list of them")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} strings")
    return tuple(stops)


def _check_rid(value: Any) -> list[str] | str | None:
    rids = value if isinstance(value, list) else [value]
    if value is not None and not (rids and all(isinstance(rid, str) and rid for rid in rids)):
        raise ValueError("must be a non-empty string, or a list of them, one for each prompt")
    if len(set(rids)) != len(rids):
        raise ValueError("ids must differ")
    return value


def _check_content(value: Any) -> str:
    """A string, or text parts put together with line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"only parts of type 'text' are supported, not {kind!r}")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part must have a string 'text'")
    return "\n".join(part["text"] for part in value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [{} if value is None else value]


Prompts = Annotated[TextOrIds | list[str] | list[list[int]], PlainValidator(_check_prompt)]
Stop = Annotated[tuple[str, ...], PlainValidator(_check_stop)]
Rid = Annotated[list[str] | str | None, PlainValidator(_check_rid)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class Body(BaseModel):
    """Something a client sends."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def refuse_unsupported(self, prefix: str = "") -> None:
        """Raise for the first field that would have to change the result and cannot."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.ignored:
                continue
            if value not in self.neutral.get(name, ()):
                param = prefix + name
                raise invalid(param, f"parameter {param!r} is not supported, got {shown(value)}",
                              "unsupported_parameter")  # fmt: skip


class Sampling(Body):
    """The fields that all ways in share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "repetition_penalty": (1,),
        "length_penalty": (1,),
        "min_tokens": (0,),
        "min_new_tokens": (0,),
        "use_beam_search": (False,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True, False),  # only for decoders of other tokenizers
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
    }

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None

    def sampling_params(
        self, info: ModelInfo, max_new_tokens: int, **logprobs: Any
    ) -> SamplingParams:
        """Everything but the seed, which differs from choice to choice."""
        temperature = 1.0 if self.temperature is None else self.temperature
        stop_token_ids = self.stop_token_ids or []
        check_token_ids(stop_token_ids, info, "stop_token_ids")
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=min(max(self.top_k or 0, 0), info.vocab_size),
            min_p=self.min_p or 0.0,
            stop=self.stop,
            stop_token_ids=frozenset(stop_token_ids),
            ignore_eos=bool(self.ignore_eos),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias=_logit_bias(self.logit_bias or {}, info),
            **logprobs,
        )


_OPENAI_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prediction", "parallel_tool_calls", "priority", "request_id",
    }
)  # fmt: skip


class StreamOptions(Body):
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"continuous_usage_stats": (False,)}

    include_usage: bool | None = None


class OpenAIBody(Sampling):
    ignored: ClassVar[frozenset[str]] = _OPENAI_IGNORED

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Rid = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self, prefix: str = "") -> None:
        super().refuse_unsupported(prefix)
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options", "stream_options is only allowed with stream=true")
            self.stream_options.refuse_unsupported("stream_options.")


class CompletionBody(OpenAIBody):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Sampling.neutral, "suffix": ("",)}

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None

    def refuse_unsupported(self, prefix: str = "") -> None:
        super().refuse_unsupported(prefix)
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of", f"best_of other than n ({self.n or 1}) is not supported, "
                                     f"got {self.best_of}", "unsupported_parameter")  # fmt: skip
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens must be at least 1 unless echo is true, got 0")

    def params(self, info: ModelInfo, num_prompt_tokens: int) -> SamplingParams:
        budget = token_budget(
            info, num_prompt_tokens, self.max_tokens, "prompt", default=DEFAULT_COMPLETION_TOKENS
        )
        return self.sampling_params(
            info,
            budget,
            logprobs=self.logprobs is not None,
            num_top_logprobs=self.logprobs or 0,
            prompt_logprobs=bool(self.echo) and self.logprobs is not None,
        )


class ChatMessage(Body):
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"name", "refusal", "annotations", "reasoning_content"}
    )
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "type": ("text", "message"),  # lm-eval's and the Responses API's
    }

    role: str
    content: Annotated[str, PlainValidator(_check_content)]

    def for_template(self) -> dict[str, str]:
        # OpenAI's newer name of the system role; templates only know the old one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatBody(OpenAIBody):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Sampling.neutral,
        "tools": ([],),
        "functions": ([],),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "separate_reasoning": (True, False),
        "stream_reasoning": (True, False),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self, prefix: str = "") -> None:
        super().refuse_unsupported(prefix)
        for index, message in enumerate(self.messages):
            message.refuse_unsupported(f"messages.{index}.")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid("max_tokens", f"max_tokens ({old}) and max_completion_tokens ({new}) "
                                        "must agree when both are given")  # fmt: skip

    def params(self, info: ModelInfo, num_prompt_tokens: int) -> SamplingParams:
        requested = self.max_completion_tokens or self.max_tokens
        return self.sampling_params(
            info,
            token_budget(info, num_prompt_tokens, requested, "messages", default=None),
            logprobs=bool(self.logprobs),
            num_top_logprobs=self.top_logprobs or 0,
        )


class NativeSampling(Sampling):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Sampling.neutral, "stream_interval": (1,)}

    max_new_tokens: Annotated[int, Field(ge=0)] | None = None
    sampling_seed: Seed | None = None

    @property
    def chosen_seed(self) -> int | None:
        return self.seed if self.seed is not None else self.sampling_seed


class GenerateBody(Body):
    """SGLang's `/generate`."""

    ignored: ClassVar[frozenset[str]] = frozenset({"priority", "log_metrics", "user", "metadata"})
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "return_hidden_states": (False,),
        "image_data": ([],),
        "return_routed_experts": (False,),
    }

    text: Prompts | None = None
    input_ids: Prompts | None = None
    sampling_params: Annotated[list[NativeSampling], BeforeValidator(_as_list)] = Field(
        default_factory=lambda: [NativeSampling()]
    )
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    rid: Rid = None

    @property
    def prompts(self) -> str | list[Any]:
        value = self.text if self.text is not None else self.input_ids
        assert value is not None
        return value

    @property
    def is_batch(self) -> bool:
        return is_batch(self.prompts)

    @property
    def scores_prompt(self) -> bool:
        start = self.logprob_start_len
        return bool(self.return_logprob) and start is not None and start >= 0

    def refuse_unsupported(self, prefix: str = "") -> None:
        super().refuse_unsupported(prefix)
        if (self.text is None) == (self.input_ids is None):
            raise invalid("text", "exactly one of text and input_ids must be given")
        if self.input_ids is not None and not (
            _is_ids(self.input_ids) or all(_is_ids(ids) for ids in self.input_ids)
        ):
            raise invalid("input_ids", "input_ids must be token ids, not text")
        if self.text is not None and not (
            isinstance(self.text, str) or all(isinstance(text, str) for text in self.text)
        ):
            raise invalid("text", "text must be text, not token ids")
        for sampling in self.sampling_params:
            sampling.refuse_unsupported("sampling_params.")

    def sampling_of(self, num_prompts: int) -> list[NativeSampling]:
        """One for each prompt."""
        given = self.sampling_params
        if len(given) not in (1, num_prompts):
            raise invalid("sampling_params", f"{num_prompts} prompts need one sampling_params or "
                                             f"as many, got {len(given)}")  # fmt: skip
        return given * num_prompts if len(given) == 1 else given

    def params(
        self, sampling: NativeSampling, info: ModelInfo, num_prompt_tokens: int
    ) -> SamplingParams:
        param = "text" if self.text is not None else "input_ids"
        budget = token_budget(
            info,
            num_prompt_tokens,
            sampling.max_new_tokens,
            param,
            default=DEFAULT_GENERATE_TOKENS,
            max_param="sampling_params.max_new_tokens",
        )
        return sampling.sampling_params(
            info,
            budget,
            logprobs=bool(self.return_logprob),
            num_top_logprobs=(self.top_logprobs_num or 0) if self.return_logprob else 0,
            prompt_logprobs=self.scores_prompt,
            prompt_logprobs_start=max(self.logprob_start_len or 0, 0),
        )


class AbortBody(Body):
    rid: Annotated[str, Field(min_length=1)] | None = None
    abort_all: bool | None = None

    def refuse_unsupported(self, prefix: str = "") -> None:
        super().refuse_unsupported(prefix)
        if self.rid is None and not self.abort_all:
            raise invalid("rid", "either rid or abort_all=true must be given")


BodyType = TypeVar("BodyType", bound=Body)


async def read_body(http: HttpRequest, kind: type[BodyType]) -> BodyType:
    """The checked body of a call."""
    body = await read_model(http, kind)
    body.refuse_unsupported()
    return body


def check_model(name: str | None, info: ModelInfo) -> None:
    """No name and "default" mean the served model."""
    if name not in (None, "default", info.served_model_name):
        raise ApiError(
            404,
            f"the model {shown(name)} does not exist; {info.served_model_name!r} is served",
            param="model",
            code="model_not_found",
        )


def is_batch(prompts: str | list[Any]) -> bool:
    return isinstance(prompts, list) and not _is_ids(prompts)


def check_token_ids(ids: list[int], info: ModelInfo, param: str) -> None:
    for token_id in ids:
        if not 0 <= token_id < info.vocab_size:
            raise invalid(
                param, f"{param}: token ids must be in [0, {info.vocab_size}), got {token_id}"
            )


def token_budget(
    info: ModelInfo,
    num_prompt_tokens: int,
    requested: int | None,
    prompt_param: str,
    *,
    default: int | None,
    max_param: str = "max_tokens",
) -> int:
    """Tokens to generate: as requested, else the default or what fits (all of it for None)."""
    limit = info.max_request_tokens
    room = limit - num_prompt_tokens
    if room < (0 if requested == 0 else 1):
        raise invalid(
            prompt_param,
            f"the maximum context length is {limit} tokens, but the prompt alone has "
            f"{num_prompt_tokens}",
            "context_length_exceeded",
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise invalid(
            max_param,
            f"the maximum context length is {limit} tokens, but {num_prompt_tokens + requested} "
            f"were requested: {num_prompt_tokens} in the prompt and {requested} to generate "
            f"({max_param}); at most {room} fit",
            "context_length_exceeded",
        )
    return requested


def _logit_bias(given: Mapping[str, float], info: ModelInfo) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10 or int(key) >= info.vocab_size:
            raise invalid("logit_bias", "logit_bias: keys must be token ids in "
                                        f"[0, {info.vocab_size}), got {shown(key)}")  # fmt: skip
        bias[int(key)] = value
    return bias
