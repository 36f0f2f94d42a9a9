"""Metrics for Prometheus, under the names that vLLM uses, so that its dashboards work."""

from collections.abc import Callable, Iterator, Mapping
from math import inf

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import eesd
from eesd.runtime.batch.service import Load, Service
from eesd.runtime.decoding.stats import Stats
from eesd.runtime.request import Generation, Request, Update

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
ITERATIONS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The upper bounds of the histograms' buckets. The first three tuples are in seconds, the fourth
counts tokens per request, and the last counts tokens per round."""
REASONS = {"cancelled": "abort"}
"""Maps our finish reasons to vLLM's names where the names differ."""
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Time between rounds that bring tokens.", BETWEEN),
    "e2e_request_latency_seconds": ("Time of a whole request.", WHOLE),
    "request_queue_time_seconds": ("Time until a request has a row of the batch.", FIRST_TOKEN),
    "request_prefill_time_seconds": ("Time in calls that prefill a prompt.", FIRST_TOKEN),
    "request_decode_time_seconds": ("Time from the first token to the last.", WHOLE),
    "request_inference_time_seconds": ("Time in the batch, to the last token.", WHOLE),
    "request_time_per_output_token_seconds": ("Decode time, per token after the first.", BETWEEN),
    "request_prompt_tokens": ("Tokens of a prompt.", LENGTHS),
    "request_generation_tokens": ("Tokens generated for a text.", LENGTHS),
    "request_max_num_generation_tokens": ("Tokens of the longest of n texts.", LENGTHS),
    "request_params_max_tokens": ("Most tokens that a text may have.", LENGTHS),
    "request_params_n": ("Texts asked for, per prompt.", LENGTHS[:7]),
}
TOKENS = {
    "prompt_tokens": "Tokens of prompts.",
    "prompt_tokens_cached": "Tokens of prompts that earlier requests had computed.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Rounds that verified a draft.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
}
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
        "Pauses of requests whose memory others needed.",
        lambda load: load.pauses,
    ),
    "eesd:rounds": ("Rounds of the batch.", lambda load: load.rounds),
}
"""The metrics that the batch itself counts."""


class Metrics:
    """The counters and histograms of one server. They are kept in a separate registry. vLLM numbers
    its engines, so the single engine of this server has the number 0."""

    def __init__(self, service: Service, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model, "engine": "0"}
        self.registry.register(_LoadCollector(service, self._labels))
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, self._labels, registry=self.registry, buckets=buckets
            ).labels(**self._labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._tokens = {
            name: self._counter(f"vllm:{name}", text).labels(**self._labels)
            for name, text in TOKENS.items()
        }
        self._success = self._counter(
            "vllm:request_success", "Requests that ended, by the reason.", "finished_reason"
        )
        self._positions = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the draft.",
            "position",
        )
        self._answers = self._counter(
            "eesd:http_requests",
            "Requests of HTTP by path and status; 499: the client left.",
            "route",
            "status",
        )
        self._classes = Counter(
            "http_requests",
            "Requests of HTTP by path, method and class of status, such as 2xx.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self._set("eesd:build_info", "1; the version that runs.", version=eesd.__version__)
        self._set("vllm:engine_sleep_state", "1: the engine runs.", sleep_state="awake")
        self._set(
            "vllm:cache_config_info",
            "1; the size of the KV cache, in blocks of one slot.",
            block_size="1",
            num_gpu_blocks=str(service.slots),
            enable_prefix_caching=str(service.options.prefix_memory > 0),
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*self._labels, *labels), registry=self.registry)

    def _set(self, name: str, text: str, **labels: str) -> None:
        """Add a gauge whose value is always 1 and whose labels carry the information."""
        labels = self._labels | labels
        Gauge(name, text, labels, registry=self.registry).labels(**labels).set(1)

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an HTTP request. Refused requests are counted as well.

        Args:
            method: HTTP method. Methods that clients make up are counted together.
            route: Path of the route in the schema, or ``other``.
            status: Status of the answer.
        """
        self._answers.labels(**self._labels, route=route, status=str(status)).inc()
        known = method if method in METHODS else "other"
        self._classes.labels(handler=route, method=known, status=f"{status // 100}xx").inc()

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of the histograms in :data:`HISTOGRAMS`."""
        self._histograms[name].observe(value)

    def count(self, name: str, amount: int) -> None:
        """Add an amount to one of the counters in :data:`TOKENS`."""
        self._tokens[name].inc(amount)

    def asked(self, requests: list[Request]) -> None:
        """Record the limits of the texts that are requested for one prompt."""
        self.observe("request_params_n", len(requests))
        for request in requests:
            self.observe("request_params_max_tokens", request.max_new_tokens)

    def ended(self, reason: str) -> None:
        """Count the end of a text."""
        reason = REASONS.get(reason, reason)
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def drafted(self, before: Stats, now: Stats) -> None:
        """Count the drafts between two successive statistics of a request."""
        self.count("spec_decode_num_drafts", num_drafts(now) - num_drafts(before))
        self.count("spec_decode_num_draft_tokens", now.draft_tokens - before.draft_tokens)
        self.count("spec_decode_num_accepted_tokens", now.accepted_tokens - before.accepted_tokens)
        for position, accepted in enumerate(now.accepted_at_depth):
            new = accepted - sum(before.accepted_at_depth[position : position + 1])
            if new:
                self._positions.labels(**self._labels, position=str(position)).inc(new)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Meter:
    """Measures one text. All times are seconds of the same monotonic clock.

    Args:
        metrics: Metrics of the server.
        generation: The generation of the text.
        start: Time of the request.
        keep_tokens: Whether the client receives the tokens. If the client wants only the prompt's
            log-probabilities, no tokens are counted.

    Attributes:
        tokens: Number of tokens that the client received.
    """

    def __init__(
        self, metrics: Metrics, generation: Generation, start: float, keep_tokens: bool
    ) -> None:
        self._metrics = metrics
        self._generation = generation
        self._start = start
        self._keep = keep_tokens
        self._first = 0.0
        self._last = 0.0
        self._stats = Stats()
        self._ended = False
        self.tokens = 0

    def see(self, update: Update, now: float) -> None:
        """Process an update that arrived at time ``now``."""
        if update.tokens:
            self._take(update, now)
        self._metrics.drafted(self._stats, update.stats)
        self._stats = update.stats
        if update.finish_reason:
            self.end(update.finish_reason, now)

    def _take(self, update: Update, now: float) -> None:
        metrics = self._metrics
        if self._first:
            metrics.observe("inter_token_latency_seconds", now - self._last)
        else:
            self._first = now
            metrics.observe("time_to_first_token_seconds", now - self._start)
            metrics.count("prompt_tokens", update.stats.prompt_tokens)
            metrics.count("prompt_tokens_cached", update.cached_tokens)
            metrics.observe("request_prompt_tokens", update.stats.prompt_tokens)
            metrics.observe("request_prefill_time_seconds", update.stats.prefill_seconds)
        self._last = now
        if self._keep:
            self.tokens += len(update.tokens)
            metrics.count("generation_tokens", len(update.tokens))

    def end(self, reason: str, now: float) -> None:
        """Count the end of the text. Further calls have no effect."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.ended(reason)
        metrics.observe("request_generation_tokens", self.tokens)
        metrics.observe("request_queue_time_seconds", self._began(now) - self._start)
        metrics.observe("e2e_request_latency_seconds", now - self._start)
        if self._first:
            decoding = self._last - self._first
            metrics.observe("request_decode_time_seconds", decoding)
            metrics.observe("request_inference_time_seconds", self._last - self._began(now))
            if self.tokens > 1:
                per_token = decoding / (self.tokens - 1)
                metrics.observe("request_time_per_output_token_seconds", per_token)

    def _began(self, now: float) -> float:
        """Return the time at which the text got a row, or ``now`` if it is still waiting."""
        return self._generation.began or now

    def facts(self) -> dict[str, float]:
        """Return the times of the text so far (in seconds) for the log and for traces."""
        began = self._generation.began
        if began is None:
            return {}
        found = {
            "queue_seconds": began - self._start,
            "prefill_seconds": self._stats.prefill_seconds,
        }
        if self._first:
            found["first_token_seconds"] = self._first - self._start
        return {name: round(value, 4) for name, value in found.items()}


def num_drafts(stats: Stats) -> int:
    """Return the number of rounds that verified at least one draft token."""
    return sum(stats.verified_at_depth[:1])


class _LoadCollector(Collector):
    """Collects the state of the batch when Prometheus scrapes."""

    def __init__(self, service: Service, labels: Mapping[str, str]) -> None:
        self._service = service
        self._names = [*labels]
        self._values = [*labels.values()]

    def collect(self) -> Iterator[Metric]:
        load = self._service.load()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            gauge.add_metric(self._values, float(value(load)))
            yield gauge
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue: all wait for a row or for memory.",
            labels=[*self._names, "reason"],
        )
        waiting.add_metric([*self._values, "capacity"], load.queued)
        yield waiting
        for name, (text, count) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, float(count(load)))
            yield counter
        yield self._iterations(load.round_tokens)

    def _iterations(self, rounds: Mapping[int, int]) -> Metric:
        """Return the histogram of the tokens per round."""
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens of a round: of prompts, and new ones.",
            labels=self._names,
        )
        buckets = [
            (str(float(bound)).replace("inf", "+Inf"), _up_to(bound, rounds))
            for bound in (*ITERATIONS, inf)
        ]
        total = sum(tokens * count for tokens, count in rounds.items())
        family.add_metric(self._values, buckets, total)
        return family


def _up_to(bound: float, rounds: Mapping[int, int]) -> int:
    """Return the number of rounds that had at most ``bound`` tokens."""
    return sum(count for tokens, count in rounds.items() if tokens <= bound)
