"""Counts XLA compilations, to prove that a ready server makes none."""

import jax.monitoring


COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts from its creation on, for the whole process.

    A program found in the persistent cache counts too: a running step would have waited for it.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
