"""SGLang's endpoints: `/generate`, health, model info, cache, abort, metrics."""

import asyncio
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, Response

from serving.http.calls import (
    Call,
    Choice,
    EventStream,
    Prompt,
    Result,
    make_choices,
    name_prompts,
    new_id,
    results_of,
)
from serving.http.errors import ApiError, failed, invalid, unavailable
from serving.http.events import DONE, event
from serving.http.logprobs import native_logprobs, native_top_logprobs
from serving.http.protocol import AbortBody, GenerateBody, read_body
from serving.http.service import Service
from serving.lockstep import Record
from serving.request import SamplingParams
from serving.roles import Role


def make_router(service: Service, registry: CollectorRegistry) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(http: HttpRequest) -> Response:
        return await _generate(service, http)

    @router.get("/health")
    async def health() -> Response:
        _check_alive(service)
        return JSONResponse({"status": "ok"})

    @router.get("/health_generate")
    async def health_generate(http: HttpRequest) -> Response:
        _check_alive(service)
        await _generate_one_token(service, http)
        return JSONResponse({"status": "ok"})

    @router.get("/disaggregation")
    async def disaggregation() -> Response:
        return JSONResponse(
            {
                "mode": service.role.value,
                "transfer_address": service.transfer_address,
                "model": service.info.served_model_name,
                "page_size": service.info.page_size,
                "num_running": service.loop.num_running,
                "num_waiting": service.loop.num_waiting,
                "draining": not service.loop.is_accepting,
            }
        )

    @router.get("/get_model_info")
    async def get_model_info() -> Response:
        info = service.info
        return JSONResponse(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "is_generation": True,
                "served_model_name": info.served_model_name,
                "vocab_size": info.vocab_size,
                "context_length": info.context_length,
                "max_request_tokens": info.max_request_tokens,
                "eos_token_ids": list(info.eos_token_ids),
                "has_chat_template": service.tokenizer.has_chat_template,
            }
        )

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache() -> Response:
        _check_alive(service)
        try:
            await asyncio.to_thread(service.loop.flush_cache)
        except RuntimeError as error:
            raise invalid(None, f"the cache was not flushed: {error}") from error
        return JSONResponse({"status": "flushed"})

    async def record(what: Record) -> list[str]:
        _check_alive(service)
        try:
            return await asyncio.to_thread(service.loop.record, what)
        except RuntimeError as error:
            raise invalid(None, str(error)) from error
        except OSError as error:
            raise failed(str(error)) from error

    @router.post("/start_expert_distribution_record")
    async def start_expert_distribution_record() -> Response:
        await record(Record.START)
        return JSONResponse({"status": "recording"})

    @router.post("/stop_expert_distribution_record")
    async def stop_expert_distribution_record() -> Response:
        await record(Record.STOP)
        return JSONResponse({"status": "stopped"})

    @router.post("/dump_expert_distribution_record")
    async def dump_expert_distribution_record() -> Response:
        return JSONResponse({"files": await record(Record.DUMP)})

    @router.post("/abort_request")
    async def abort_request(http: HttpRequest) -> Response:
        body = await read_body(http, AbortBody)
        if body.rid is None:
            return JSONResponse({"num_aborted": service.loop.abort_all()})
        return JSONResponse({"num_aborted": service.calls.abort(body.rid)})

    @router.get("/metrics")
    async def metrics() -> Response:
        # Off the event loop: other members may be asked for theirs.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _check_alive(service: Service) -> None:
    if service.loop.error is not None:
        raise unavailable(f"the serving loop has stopped: {service.loop.error}")


async def _generate_one_token(service: Service, http: HttpRequest) -> None:
    """Through the whole engine; raises ApiError 503 if no token comes."""
    # A prefill worker can do this much alone.
    prefill_address = None if service.role is Role.PREFILL else service.prefill_address(http)
    rid = new_id("health-")
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    prompt = Prompt(service.tokenizer.encode("a"))
    call = service.calls.start(rid, [Choice(rid, rid, prompt, params)], prefill_address)
    try:
        async with asyncio.timeout(service.health_timeout):
            await results_of(call, http.receive)
    except TimeoutError:
        raise unavailable(f"no token within {service.health_timeout:g} s") from None
    except ApiError as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        raise unavailable(error.message) from error


async def _generate(service: Service, http: HttpRequest) -> Response:
    body = await read_body(http, GenerateBody)
    param = "text" if body.text is not None else "input_ids"
    prompts = await service.encode(body.prompts, param)
    prefill_address = service.prefill_address(http)
    call_id, names = name_prompts(body.rid, len(prompts), "gen-")
    samplings = body.sampling_of(len(prompts))
    choices = make_choices(
        prompts,
        [
            body.params(sampling, service.info, len(prompt.ids))
            for sampling, prompt in zip(samplings, prompts, strict=True)
        ],
        num_choices=[sampling.n or 1 for sampling in samplings],
        seeds=[sampling.chosen_seed for sampling in samplings],
        names=names,
    )
    call = service.calls.start(call_id, choices, prefill_address)
    writer = _Writer(service, call, body)
    if body.stream:
        return EventStream(call, writer.events())
    return JSONResponse(writer.whole(await results_of(call, http.receive)))


class _Writer:
    """Writes a call's outputs in SGLang's form."""

    def __init__(self, service: Service, call: Call, body: GenerateBody):
        self._call = call
        self._body = body
        self._tokenizer = service.tokenizer if body.return_text_in_logprobs else None
        self._is_list = body.is_batch or len(call.choices) > 1
        self._started = time.monotonic()

    def whole(self, results: list[Result]) -> list[dict[str, Any]] | dict[str, Any]:
        items = [self._item(index, result) for index, result in enumerate(results)]
        return items if self._is_list else items[0]

    async def events(self) -> AsyncIterator[str]:
        """Every event holds all text and tokens of its choice so far, as SGLang's do."""
        results = [Result() for _ in self._call.choices]
        async for index, output in self._call:
            if output.finish_reason == "error":
                yield event(failed(output.error).body)
                break
            results[index].add(output)
            item = self._item(index, results[index])
            yield event({**item, "index": index} if self._is_list else item)
        yield DONE

    def _item(self, index: int, result: Result) -> dict[str, Any]:
        choice = self._call.choices[index]
        meta: dict[str, Any] = {
            "id": choice.rid,
            "finish_reason": _finish_reason(result),
            "prompt_tokens": len(choice.prompt.ids),
            "completion_tokens": len(result.token_ids),
            "cached_tokens": result.cached_tokens,
            "e2e_latency": time.monotonic() - self._started,
        }
        if self._body.return_logprob:
            meta.update(self._logprobs(result))
        return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta}

    def _logprobs(self, result: Result) -> dict[str, Any]:
        tokens = {"input": result.prompt_logprobs, "output": result.logprobs}
        num_top = self._body.top_logprobs_num or 0
        values: dict[str, Any] = {}
        for side, entries in tokens.items():
            values[f"{side}_token_logprobs"] = native_logprobs(self._tokenizer, entries)
            if num_top:
                top = native_top_logprobs(self._tokenizer, entries, num_top)
                values[f"{side}_top_logprobs"] = top
        return values


def _finish_reason(result: Result) -> dict[str, Any] | None:
    match result.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": result.matched_stop}
        case "length":
            return {"type": "length", "length": len(result.token_ids)}
        case reason:
            return {"type": reason}
