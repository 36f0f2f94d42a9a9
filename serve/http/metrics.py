"""What Prometheus is told, under the names that vLLM uses, so that its dashboards work."""

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import eesd
from eesd.runtime.batch.service import Load, Service
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.request import Generation, Update

FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
BETWEEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
)
WHOLE = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
REASONS = {"cancelled": "abort"}
"""Finish reasons that vLLM calls otherwise."""


GAUGES: dict[str, tuple[str, Callable[[Load], float]]] = {
    "vllm:num_requests_running": (
        "Requests in the batch.",
        lambda load: load.running + load.prefilling,
    ),
    "vllm:num_requests_waiting": ("Requests in the queue.", lambda load: load.queued),
    "vllm:kv_cache_usage_perc": (
        "Share of the KV memory that is used, from 0 to 1.",
        lambda load: load.kv_used,
    ),
    "eesd:drafted_levels": (
        "Levels of drafts that the last round verified, at most.",
        lambda load: load.drafted,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[Load], int]]] = {
    "vllm:prefix_cache_queries": (
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda load: load.prefix_queries,
    ),
    "vllm:prefix_cache_hits": ("Those of them that were found.", lambda load: load.prefix_hits),
    "vllm:num_preemptions": (
        "How often a request paused because others needed its memory.",
        lambda load: load.pauses,
    ),
    "eesd:rounds": ("Rounds of the batch.", lambda load: load.rounds),
}
"""What a batch says of itself."""


class Metrics:
    """The counters and histograms of one server, in a registry of their own."""

    def __init__(self, service: Service, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_LoadCollector(service, model))
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=buckets
            )
            return made.labels(model)

        self.first_token = histogram(
            "time_to_first_token_seconds", "Time until the first token.", FIRST_TOKEN
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Time between rounds that bring tokens.", BETWEEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "Time of a whole request.", WHOLE)
        self.queued = histogram(
            "request_queue_time_seconds",
            "Time until a request has a place in the batch.",
            FIRST_TOKEN,
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Time in calls that read a prompt.", FIRST_TOKEN
        )
        self.prompt_length = histogram("request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self.text_length = histogram(
            "request_generation_tokens", "Tokens generated for a request.", LENGTHS
        )
        self._answers = counter(
            "eesd:http_requests",
            "Requests of HTTP by path and status; 499: the client left.",
            "route",
            "status",
        )
        labels = ["model_name", "version"]
        build = Gauge("eesd:build_info", "1; which version runs.", labels, registry=self.registry)
        build.labels(model, eesd.__version__).set(1)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.").labels(model)
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(
            model
        )
        self._success = counter(
            "vllm:request_success", "Requests that ended, by the reason.", "finished_reason"
        )
        self.drafts = counter(
            "vllm:spec_decode_num_drafts", "Rounds that verified a draft."
        ).labels(model)
        self.draft_tokens = counter(
            "vllm:spec_decode_num_draft_tokens", "Draft tokens verified."
        ).labels(model)
        self.accepted = counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."
        ).labels(model)
        self._positions = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            "position",
        )

    def answered(self, route: str, status: int) -> None:
        """Count a request of HTTP, refused ones, too. ``route``: its path in the schema, or
        ``other``."""
        self._answers.labels(self._model, route, str(status)).inc()

    def ended(self, reason: str) -> None:
        self._success.labels(self._model, REASONS.get(reason, reason)).inc()

    def drafted(self, before: Stats, now: Stats) -> None:
        """Count what was drafted between two statistics of one request."""
        self.drafts.inc(num_drafts(now) - num_drafts(before))
        self.draft_tokens.inc(now.draft_tokens - before.draft_tokens)
        self.accepted.inc(now.accepted_tokens - before.accepted_tokens)
        for position, accepted in enumerate(now.accepted_at_depth):
            earlier = (
                before.accepted_at_depth[position]
                if position < len(before.accepted_at_depth)
                else 0
            )
            if accepted > earlier:
                self._positions.labels(self._model, position).inc(accepted - earlier)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Meter:
    """Measures one request. Times are seconds of one monotonic clock."""

    def __init__(self, metrics: Metrics, generation: Generation, start: float) -> None:
        self._metrics = metrics
        self._generation = generation
        self._start = start
        self._last: float | None = None
        self._stats = Stats()
        self._ended = False

    def see(self, update: Update, now: float) -> None:
        metrics = self._metrics
        if update.tokens:
            if self._last is None:
                metrics.first_token.observe(now - self._start)
                metrics.prompt_tokens.inc(update.stats.prompt_tokens)
                metrics.prompt_length.observe(update.stats.prompt_tokens)
                metrics.prefill.observe(update.stats.prefill_seconds)
            else:
                metrics.between.observe(now - self._last)
            self._last = now
            metrics.generation_tokens.inc(len(update.tokens))
        metrics.drafted(self._stats, update.stats)
        self._stats = update.stats
        if update.finish_reason:
            self.end(update.finish_reason, now)

    def end(self, reason: str, now: float) -> None:
        """Count the end of the request, once."""
        if not self._ended:
            self._ended = True
            self._metrics.ended(reason)
            self._metrics.text_length.observe(self._stats.new_tokens)
            began = self._generation.began
            self._metrics.queued.observe((now if began is None else began) - self._start)
            self._metrics.whole.observe(now - self._start)


def num_drafts(stats: Stats) -> int:
    """Rounds that verified at least one draft token."""
    return stats.verified_at_depth[0] if stats.verified_at_depth else 0


class _LoadCollector(Collector):
    """How busy the batch is when Prometheus asks."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model

    def collect(self) -> Iterator[Metric]:
        load = self._service.load()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], float(value(load)))
            yield gauge
        for name, (text, count) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], float(count(load)))
            yield counter
