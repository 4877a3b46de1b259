"""Calls being served: from the sequences a client asks for to the serving loop and back.

A call is one HTTP request, its sequences are the choices of all its prompts. The loop's thread puts
outputs into the call's queue through the event loop; a client that goes away ends its sequences.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Protocol, runtime_checkable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serving.http.errors import ApiError, client_gone, failed, invalid, peer_failed, unavailable
from serving.lockstep import Record
from serving.loop import QueueFullError
from serving.request import FinishReason, Output, Request, SamplingParams, TokenLogprob


@runtime_checkable
class Loop(Protocol):
    """What is needed of `serving.loop.ServingLoop`."""

    @property
    def error(self) -> str | None: ...

    @property
    def is_accepting(self) -> bool: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    def submit(self, requests: list[Request]) -> None: ...

    def abort(self, rid: str) -> bool: ...

    def abort_all(self) -> int: ...

    def flush_cache(self) -> None: ...

    def record(self, what: Record) -> list[str]: ...


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and its text where the client gave one."""

    ids: list[int]
    text: str | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sequence to be generated.

    Attributes:
      rid: its id in the loop.
      name: the id the client knows its prompt by.
    """

    rid: str
    name: str
    prompt: Prompt
    params: SamplingParams


@dataclasses.dataclass
class Result:
    """What a choice has brought so far."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    cached_tokens: int = 0

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.matched_stop = output.matched_stop
        self.cached_tokens += output.cached_tokens


def make_choices(
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    num_choices: Sequence[int],
    seeds: Sequence[int | None],
    names: Sequence[str],
) -> list[Choice]:
    """The choices of each prompt, prompt by prompt. The i-th of a prompt has seed + i, or a random
    one if there is none."""
    choices = []
    for prompt, common, count, seed, name in zip(
        prompts, params, num_choices, seeds, names, strict=True
    ):
        for index in range(count):
            own_seed = secrets.randbits(64) if seed is None else (seed + index) % 2**64
            choices.append(
                Choice(
                    rid=name if count == 1 else f"{name}-{index}",
                    name=name,
                    prompt=prompt,
                    params=dataclasses.replace(common, seed=own_seed),
                )
            )
    return choices


def name_prompts(
    rid: str | list[str] | None, num_prompts: int, prefix: str
) -> tuple[str, list[str]]:
    """The call's id and an id for each prompt, the client's own where it gave some."""
    if isinstance(rid, list):
        if len(rid) != num_prompts:
            raise invalid("rid", f"{num_prompts} prompts need as many rids, got {len(rid)}")
        return (rid[0] if num_prompts == 1 else new_id(prefix)), rid
    call_id = new_id(prefix) if rid is None else rid
    if num_prompts == 1:
        return call_id, [call_id]
    return call_id, [f"{call_id}-{index}" for index in range(num_prompts)]


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


class Call:
    """The choices of one HTTP request while they are served. Iterating gives (index, output) pairs
    until the last choice has finished; always `close` it. Made by `Calls.start`."""

    def __init__(self, calls: "Calls", call_id: str, choices: list[Choice]):
        self.call_id = call_id
        self.choices = choices
        self._calls = calls
        self._unfinished = set(range(len(choices)))
        self._outputs: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()
        self._first: tuple[int, Output] | None = None
        self._event_loop = asyncio.get_running_loop()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts; that of several choices counts once."""
        return sum({choice.name: len(choice.prompt.ids) for choice in self.choices}.values())

    def cached_tokens(self, of_choices: Sequence[int]) -> int:
        """Tokens of the prompts that no choice had to compute, when each choice found so many."""
        cached: dict[str, int] = {}
        for choice, count in zip(self.choices, of_choices, strict=True):
            cached[choice.name] = min(count, cached.get(choice.name, count))
        return sum(cached.values())

    def requests(self, prefill_address: str | None) -> list[Request]:
        return [
            Request(
                choice.rid,
                list(choice.prompt.ids),
                choice.params,
                self._sink(index),
                prefill_address=prefill_address,
            )
            for index, choice in enumerate(self.choices)
        ]

    def unfinished_rids(self, name: str | None = None) -> list[str]:
        """Of all choices, or of those a client knows by this name."""
        choices = [self.choices[index] for index in sorted(self._unfinished)]
        return [
            choice.rid
            for choice in choices
            if name is None or name in (self.call_id, choice.name, choice.rid)
        ]

    async def begin(self) -> None:
        """Wait for the first output. Raises ApiError if that is a failure."""
        self._first = await self._outputs.get()
        raise_if_failed(self._first[1])

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while self._unfinished:
            index, output = self._first or await self._outputs.get()
            self._first = None
            if output.finish_reason is not None:
                self._unfinished.discard(index)
            yield index, output

    def abort(self) -> None:
        for rid in self.unfinished_rids():
            self._calls.loop.abort(rid)

    async def end(self) -> None:
        """End what is not finished, and wait until it has ended."""
        self.abort()
        async for _ in self:
            pass

    def close(self) -> None:
        """End what is not finished; nothing more is read."""
        self.abort()
        self._calls.forget(self)

    def _sink(self, index: int):
        def sink(output: Output) -> None:
            # The event loop is gone when the server was stopped without waiting for its clients.
            with contextlib.suppress(RuntimeError):
                self._event_loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))

        return sink


class Calls:
    """All calls being served. Used on the event loop only."""

    def __init__(self, loop: Loop):
        self.loop = loop
        self._active: set[Call] = set()

    def start(
        self, call_id: str, choices: list[Choice], prefill_address: str | None = None
    ) -> Call:
        """Hand all choices to the loop, or raise the ApiError that says why not."""
        call = Call(self, call_id, choices)
        try:
            self.loop.submit(call.requests(prefill_address))
        except QueueFullError as error:
            raise unavailable(str(error), retry_after=error.retry_after) from error
        except ValueError as error:
            raise invalid("rid", str(error)) from error
        except RuntimeError as error:
            raise unavailable(str(error)) from error
        self._active.add(call)
        return call

    def forget(self, call: Call) -> None:
        self._active.discard(call)

    def abort(self, name: str) -> int:
        """End the choices that a client knows by this id; how many there were."""
        rids = [rid for call in self._active for rid in call.unfinished_rids(name)]
        return sum(self.loop.abort(rid) for rid in rids or [name])


@contextlib.asynccontextmanager
async def watched(call: Call, receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """Ends the call's choices as soon as the client is gone, and in any case at the exit. The task
    is done when the client is gone."""
    watcher = asyncio.create_task(_abort_on_disconnect(call, receive))
    try:
        yield watcher
    except ApiError:
        # Whoever is told of it may ask again at once, with the same ids.
        await call.end()
        raise
    finally:
        watcher.cancel()
        call.close()


async def _abort_on_disconnect(call: Call, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.abort()


def raise_if_failed(output: Output) -> None:
    if output.failed_peer is not None:
        raise peer_failed(output.error or "a prefill worker failed", output.failed_peer)
    if output.finish_reason == "error":
        raise failed(output.error)


async def results_of(call: Call, receive: Receive) -> list[Result]:
    """Everything the choices bring. Raises ApiError if one fails."""
    results = [Result() for _ in call.choices]
    async with watched(call, receive) as watcher:
        async for index, output in call:
            raise_if_failed(output)
            results[index].add(output)
        if watcher.done():
            raise client_gone()
    return results


class EventStream(StreamingResponse):
    """Server-sent events of a call. A failure before the first of them is an ordinary answer."""

    def __init__(self, call: Call, events: AsyncIterator[str]):
        super().__init__(
            events,
            media_type="text/event-stream",
            # Proxies must hand on every event at once.
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with watched(self._call, receive):
            await self._call.begin()
            # Servers may raise OSError when the client is gone.
            with contextlib.suppress(OSError):
                await self.stream_response(send)
