"""What every endpoint works with, and prompts made into tokens."""

import asyncio
import dataclasses
from typing import Any

from fastapi import Request as HttpRequest

from jaxmoe.tokenizer import Tokenizer
from serving.connection import parse_address
from serving.http.calls import Calls, Loop, Prompt
from serving.http.errors import invalid
from serving.http.protocol import ModelInfo, check_token_ids, is_batch
from serving.roles import Role


PREFILL_HEADER = "X-Prefill-Address"


@dataclasses.dataclass(frozen=True)
class Service:
    """The served model behind the endpoints.

    Attributes:
      created: when serving began, seconds of the epoch.
      health_timeout: seconds `/health_generate` waits for its token.
      transfer_address: of a prefill worker, where decode workers reach it.
    """

    loop: Loop
    calls: Calls
    tokenizer: Tokenizer
    info: ModelInfo
    created: int
    health_timeout: float
    role: Role = Role.UNIFIED
    transfer_address: str | None = None

    def prefill_address(self, http: HttpRequest) -> str | None:
        """The worker that computes the prompts of this request, None if this one does.

        Raises ApiError for what a worker of this role cannot take.
        """
        address = http.headers.get(PREFILL_HEADER)
        match self.role:
            case Role.PREFILL:
                raise invalid(None, "a prefill worker answers no requests: ask the router")
            case Role.UNIFIED if address is not None:
                raise invalid(PREFILL_HEADER, f"this is no decode worker, got {address}")
            case Role.DECODE if address is None:
                raise invalid(
                    PREFILL_HEADER,
                    f"a decode worker needs to be told in {PREFILL_HEADER} which worker computes "
                    "prompts: ask the router",
                )
        if address is not None:
            try:
                parse_address(address)
            except ValueError as error:
                raise invalid(PREFILL_HEADER, f"{PREFILL_HEADER} {error}") from None
        return address

    async def encode(self, prompts: str | list[Any], param: str) -> list[Prompt]:
        """Tokens of each prompt; texts get the special tokens the model expects."""
        items = prompts if isinstance(prompts, list) and is_batch(prompts) else [prompts]
        # Off the event loop: a long text takes a while, and others are streaming.
        return await asyncio.to_thread(lambda: [self._encode(item, param) for item in items])

    def _encode(self, prompt: str | list[int], param: str) -> Prompt:
        if isinstance(prompt, list):
            check_token_ids(prompt, self.info, param)
            return Prompt(prompt)
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise invalid(param, f"{param}: the text has no tokens, got {prompt!r}")
        return Prompt(ids, prompt)
