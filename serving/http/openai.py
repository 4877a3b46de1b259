"""`/v1/completions`, `/v1/chat/completions` and `/v1/models`, as OpenAI describes them."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jaxmoe.tokenizer import ChatTemplateError, Tokenizer
from serving.http.calls import (
    Call,
    Choice,
    EventStream,
    Prompt,
    Result,
    make_choices,
    name_prompts,
    results_of,
)
from serving.http.errors import failed, invalid
from serving.http.events import DONE, event
from serving.http.logprobs import CompletionLogprobs, chat_logprobs
from serving.http.protocol import ChatBody, CompletionBody, OpenAIBody, check_model, read_body
from serving.http.service import Service
from serving.request import Output, TokenLogprob


def make_router(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(service)]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, service.info)
        return JSONResponse(_model_card(service))

    @router.post("/completions")
    async def completions(http: HttpRequest) -> Response:
        body = await read_body(http, CompletionBody)
        check_model(body.model, service.info)
        prompts = await service.encode(body.prompt, "prompt")
        return await _answer(
            service, http, body, prompts, "cmpl-", lambda call: _Completions(service, call, body)
        )

    @router.post("/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        body = await read_body(http, ChatBody)
        check_model(body.model, service.info)
        prompt = await asyncio.to_thread(_encode_chat, service.tokenizer, body)
        return await _answer(
            service, http, body, [prompt], "chatcmpl-", lambda call: _Chat(service, call, body)
        )

    return router


async def _answer(
    service: Service,
    http: HttpRequest,
    body: CompletionBody | ChatBody,
    prompts: Sequence[Prompt],
    prefix: str,
    make_writer: "Callable[[Call], _Writer]",
) -> Response:
    prefill_address = service.prefill_address(http)
    call_id, names = name_prompts(body.rid, len(prompts), prefix)
    choices = make_choices(
        prompts,
        [body.params(service.info, len(prompt.ids)) for prompt in prompts],
        num_choices=[body.n or 1] * len(prompts),
        seeds=[body.seed] * len(prompts),
        names=names,
    )
    call = service.calls.start(call_id, choices, prefill_address)
    writer = make_writer(call)
    if body.stream:
        return EventStream(call, writer.events())
    return JSONResponse(writer.whole(await results_of(call, http.receive)))


class _Writer:
    """Writes a call's outputs in one endpoint's form."""

    whole_object: str
    chunk_object: str

    def __init__(self, service: Service, call: Call, body: OpenAIBody):
        self._call = call
        self._tokenizer = service.tokenizer
        self._model = service.info.served_model_name
        self._created = int(time.time())
        self._includes_usage = body.includes_usage

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self.whole_choice(index, result) for index, result in enumerate(results)]
        usage = self._usage(
            sum(len(result.token_ids) for result in results),
            [result.cached_tokens for result in results],
        )
        return {**self._head(self.whole_object), "choices": choices, "usage": usage}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        num_generated, cached_tokens = 0, [0] * len(self._call.choices)
        async for index, output in self._call:
            if output.finish_reason == "error":
                yield event(failed(output.error).body)
                yield DONE
                return
            num_generated += len(output.token_ids)
            cached_tokens[index] += output.cached_tokens
            for choice in self.chunk_choices(index, output):
                yield event(self._chunk([choice]))
        if self._includes_usage:
            usage = self._usage(num_generated, cached_tokens)
            yield event({**self._chunk([]), "usage": usage})
        yield DONE

    def whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, index: int, output: Output) -> list[dict[str, Any]]:
        """What an output adds to its choice: one entry for each chunk to send."""
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._call.call_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": choices}
        # OpenAI: null in every chunk but the last.
        return {**chunk, "usage": None} if self._includes_usage else chunk

    def _usage(self, num_generated: int, cached_tokens: Sequence[int]) -> dict[str, Any]:
        """`cached_tokens` of each choice."""
        num_prompt = self._call.prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": self._call.cached_tokens(cached_tokens)},
        }


class _Completions(_Writer):
    whole_object = chunk_object = "text_completion"

    def __init__(self, service: Service, call: Call, body: CompletionBody):
        super().__init__(service, call, body)
        self._echoes = bool(body.echo)
        num_top = body.logprobs
        self._logprobs = (
            None
            if num_top is None
            else [CompletionLogprobs(self._tokenizer, num_top) for _ in call.choices]
        )
        self._started: set[int] = set()

    def whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echo(self._call.choices[index]) + result.text,
            "logprobs": self._piece(index, [*result.prompt_logprobs, *result.logprobs]),
            "finish_reason": result.finish_reason,
            "matched_stop": result.matched_stop,
        }

    def chunk_choices(self, index: int, output: Output) -> list[dict[str, Any]]:
        is_first = index not in self._started
        self._started.add(index)
        text = (self._echo(self._call.choices[index]) if is_first else "") + output.text
        tokens = [*output.prompt_logprobs, *output.logprobs]
        if not text and not tokens and output.finish_reason is None:
            return []
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._piece(index, tokens),
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["matched_stop"] = output.matched_stop
        return [choice]

    def _echo(self, choice: Choice) -> str:
        if not self._echoes:
            return ""
        prompt = choice.prompt
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.ids)

    def _piece(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].piece(tokens)


class _Chat(_Writer):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, service: Service, call: Call, body: ChatBody):
        super().__init__(service, call, body)
        self._has_logprobs = bool(body.logprobs)
        self._num_top = body.top_logprobs or 0
        self._started: set[int] = set()

    def whole_choice(self, index: int, result: Result) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._piece(result.logprobs),
            "finish_reason": result.finish_reason,
            "matched_stop": result.matched_stop,
        }

    def chunk_choices(self, index: int, output: Output) -> list[dict[str, Any]]:
        chunks = []
        if index not in self._started:
            self._started.add(index)
            chunks.append(_delta(index, {"role": "assistant", "content": ""}))
        if output.text or output.logprobs:
            logprobs = self._piece(output.logprobs)
            chunks.append(_delta(index, {"content": output.text}, logprobs))
        if output.finish_reason is not None:
            last = _delta(index, {}, finish_reason=output.finish_reason)
            chunks.append({**last, "matched_stop": output.matched_stop})
        return chunks

    def _piece(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        return chat_logprobs(self._tokenizer, tokens, self._num_top)


def _delta(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _encode_chat(tokenizer: Tokenizer, body: ChatBody) -> Prompt:
    messages = [message.for_template() for message in body.messages]
    try:
        text = tokenizer.render_chat(messages, variables=body.chat_template_kwargs)
    except ChatTemplateError as error:
        raise invalid("messages", str(error)) from error
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise invalid("messages", "the chat template makes no tokens of the messages")
    return Prompt(ids, text)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.info.served_model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxmoe",
        "root": service.info.model_path,
        "max_model_len": service.info.context_length,
    }
