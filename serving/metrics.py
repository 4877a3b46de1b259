"""What the loop tells Prometheus, and how that of a group's members is shown in one place.

The HTTP layer adds its own counters to the registry that it shows.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jaxmoe.compilations import CompilationCounter
from serving.rebalancer import Rebalancer
from serving.scheduler import ScheduledBatch, ScheduledPrefill, Scheduler


SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class LoopMetrics:
    """Written by the loop's thread only."""

    def __init__(self, registry: CollectorRegistry, compilations: CompilationCounter):
        self._compilations = compilations
        self._compilations_when_ready: int | None = None
        self._counted = (0, 0)  # cached tokens and evicted pages that the counters have

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"jaxmoe_{name}", what, registry=registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"jaxmoe_{name}", what, labels, registry=registry)

        def seconds(name: str, what: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(
                f"jaxmoe_{name}_seconds", what, labels, buckets=SECONDS, registry=registry
            )

        self._running = gauge("num_running_reqs", "Requests that hold pages")
        self._transferring = gauge("num_transferring_reqs", "Of those, awaiting a prefill worker")
        self._queued = gauge("num_queue_reqs", "Requests that wait for pages")
        self._token_usage = gauge("token_usage", "Share of the cache's pages in use")
        self._retracted = gauge("num_retracted_reqs", "Times a request lost its pages to others")
        self._cached_pages = gauge("cached_pages", "Pages kept for later requests, held by none")
        self._hit_rate = gauge("cache_hit_rate", "Share of admitted prompt tokens found cached")
        self._cached_tokens = counter("cached_tokens", "Prompt tokens found cached")
        self._evicted_pages = counter("evicted_pages", "Cached pages given up for other requests")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens accepted")
        self._generation_tokens = counter("generation_tokens", "Tokens generated")
        self._finished = counter("finished_reqs", "Requests ended, by reason", ("reason",))
        self._first_token = seconds("time_to_first_token", "From acceptance to the first token")
        self._first_token_parts = seconds(
            "time_to_first_token_part", "What that, and the token after it, waited for", ("part",)
        )
        self._inter_token = seconds("inter_token_latency", "Between two tokens of a request")
        self._end_to_end = seconds("e2e_request_latency", "From acceptance to the last token")
        self._step = seconds("step", "One step of the engine, by phase", ("phase",))
        gauge("compilations", "XLA compilations since the start").set_function(
            lambda: compilations.count
        )
        gauge(
            "compilations_after_ready", "XLA compilations since warm-up; must stay 0"
        ).set_function(self._compilations_after_ready)

    def mark_ready(self) -> None:
        """Compilations count as unexpected from now on."""
        self._compilations_when_ready = self._compilations.count

    def observe_state(self, scheduler: Scheduler) -> None:
        self._running.set(scheduler.num_running)
        self._transferring.set(scheduler.num_transferring)
        self._queued.set(len(scheduler.waiting))
        self._token_usage.set(scheduler.page_usage)
        self._retracted.set(scheduler.num_retracted)
        self._cached_pages.set(scheduler.num_cached_pages)
        self._hit_rate.set(scheduler.num_cached_tokens / max(1, scheduler.num_prompt_tokens))
        cached_tokens, evicted_pages = self._counted
        self._counted = (scheduler.num_cached_tokens, scheduler.num_evicted_pages)
        self._cached_tokens.inc(self._counted[0] - cached_tokens)
        self._evicted_pages.inc(self._counted[1] - evicted_pages)

    def observe_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def observe_step(self, batch: ScheduledBatch, duration: float) -> None:
        phase = "prefill" if isinstance(batch, ScheduledPrefill) else "decode"
        self._step.labels(phase).observe(duration)

    def observe_token(self, now: float, submitted: float, previous: float | None) -> None:
        """A token of a request that was submitted, and had its previous token, at these times."""
        self._generation_tokens.inc()
        if previous is None:
            self._first_token.observe(now - submitted)
        else:
            self._inter_token.observe(now - previous)

    def observe_first_token_parts(self, **seconds: float) -> None:
        """Of a request: `queue`, `prefill`, and with a prefill worker `transfer`; `first_decode` is
        the time from the first token to the second."""
        for part, duration in seconds.items():
            self._first_token_parts.labels(part).observe(max(0.0, duration))

    def observe_finish(self, reason: str, duration: float) -> None:
        self._finished.labels(reason).inc()
        self._end_to_end.observe(duration)

    def _compilations_after_ready(self) -> int:
        if self._compilations_when_ready is None:
            return 0
        return self._compilations.count - self._compilations_when_ready


def observe_rebalancer(registry: CollectorRegistry, rebalancer: Rebalancer) -> None:
    """Show what a rebalancer does and has found."""
    registry.register(CountsCollector("eplb", lambda: rebalancer.counts))
    Gauge(
        "jaxmoe_eplb_balancedness", "Mean over max of ranks' tokens, of layers on average",
        registry=registry,
    ).set_function(lambda: rebalancer.balancedness)  # fmt: skip
    Gauge(
        "jaxmoe_eplb_longest_pause_seconds", "That moving experts kept steps waiting at a time",
        registry=registry,
    ).set_function(lambda: rebalancer.longest_pause)  # fmt: skip


class CountsCollector(Collector):
    """What something else counts, each as a metric: `jaxmoe_ep_remote_bytes_total` of "ep"."""

    def __init__(self, name: str, counts: Callable[[], Mapping[str, int | float]]):
        self._name = name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        for name, count in self._counts().items():
            name = f"{self._name}_{name}"
            yield CounterMetricFamily(f"jaxmoe_{name}", name.replace("_", " "), value=count)


class GroupCollector(Collector):
    """The metrics of all members, each sample with a label `member`.

    `own` are member 0's, `ask` gives the others' in Prometheus' text format.
    """

    def __init__(self, own: CollectorRegistry, ask: Callable[[], Mapping[int, str]]):
        self._own = own
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        texts = {0: generate_latest(self._own).decode(), **self._ask()}
        families: dict[str, Metric] = {}
        for member, text in sorted(texts.items()):
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for name, labels, value, *_ in family.samples:
                    merged.add_sample(name, {"member": str(member), **labels}, value)
        yield from families.values()
