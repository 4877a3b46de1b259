"""What the router tells Prometheus, beside the HTTP layer's count of requests."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.router.pool import Pool, State


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, pool: Pool):
        registry.register(_WorkerCollector(pool))
        self.retries = Counter(
            "jaxmoe_router_retries", "Requests sent once more, by reason", ("reason",),
            registry=registry,
        )  # fmt: skip
        self.first_byte = Histogram(
            "jaxmoe_router_first_byte_seconds",
            "Until a worker began to answer a generation request, retries included",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip


class _WorkerCollector(Collector):
    """Read from the pool when asked, so that workers that are gone are gone here too."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        labels = ("worker", "role")
        online = GaugeMetricFamily(
            "jaxmoe_router_worker_online", "Whether a worker may get requests", labels=labels
        )
        in_flight = GaugeMetricFamily(
            "jaxmoe_router_worker_in_flight", "Requests under way at a worker", labels=labels
        )
        for worker in self._pool.workers():
            values = (worker.url, worker.role.value)
            online.add_metric(values, worker.state is State.ONLINE)
            in_flight.add_metric(values, worker.num_requests)
        yield online
        yield in_flight
