"""Server-sent events as both OpenAI's and SGLang's streams have them."""

import json
from typing import Any


DONE = "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    """One server-sent event. ASCII, since some clients split lines at other Unicode breaks."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
