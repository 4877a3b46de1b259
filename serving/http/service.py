"""What every endpoint works with, and prompts made into tokens."""

import asyncio
import dataclasses
from typing import Any

from jaxmoe.tokenizer import Tokenizer
from serving.http.calls import Calls, Loop, Prompt
from serving.http.errors import invalid
from serving.http.protocol import ModelInfo, check_token_ids, is_batch


@dataclasses.dataclass(frozen=True)
class Service:
    """The served model behind the endpoints.

    Attributes:
      created: when serving began, seconds of the epoch.
      health_timeout: seconds `/health_generate` waits for its token.
    """

    loop: Loop
    calls: Calls
    tokenizer: Tokenizer
    info: ModelInfo
    created: int
    health_timeout: float

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
