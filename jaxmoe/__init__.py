"""DeepSeek-V3-class mixture-of-experts models over expert-parallel devices.

Pure, jittable array programs and the files they are loaded from; no threads, sockets or clock.
The host side that serves requests lives in the package `serving`.

`jaxmoe.generate` answers a list of prompts; it and its types are imported when first asked for.
"""

from typing import Any


__version__ = "0.1.0"

_OFFLINE = ("Generation", "GenerationOptions", "OfflineEngine", "generate")


def __getattr__(name: str) -> Any:
    if name in _OFFLINE:
        from jaxmoe import offline

        return getattr(offline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
