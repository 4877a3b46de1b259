"""What a worker counts of its transfers, for `/metrics`."""

import threading


class TransferCounts:
    """Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {
            "started": 0, "succeeded": 0, "failed": 0, "pages": 0, "bytes": 0, "seconds": 0.0,
        }  # fmt: skip

    def begin(self) -> None:
        self._add(started=1)

    def succeed(self, seconds: float) -> None:
        """One that took so long, from asking to the last page."""
        self._add(succeeded=1, seconds=seconds)

    def fail(self) -> None:
        self._add(failed=1)

    def move(self, num_bytes: int, num_pages: int) -> None:
        self._add(bytes=num_bytes, pages=num_pages)

    def read(self) -> dict[str, int | float]:
        with self._lock:
            return dict(self._counts)

    def _add(self, **counts: int | float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
