"""The metrics of EESD in Triton's ``/metrics``. They have the names that vLLM uses. Only the Python
inside Triton imports this module."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import triton_python_backend_utils as pb_utils

from eesd.runtime.batch.service import Service
from eesd.runtime.decoding.stats import Stats

COUNTERS: dict[str, tuple[str, Callable[[Stats], int]]] = {
    "prompt_tokens_total": ("Tokens of prompts.", lambda stats: stats.prompt_tokens),
    "generation_tokens_total": ("Tokens generated.", lambda stats: stats.new_tokens),
    "spec_decode_num_drafts_total": (
        "Rounds that verified a draft.",
        lambda stats: sum(stats.verified_at_depth[:1]),
    ),
    "spec_decode_num_draft_tokens_total": (
        "Draft tokens verified.",
        lambda stats: stats.draft_tokens,
    ),
    "spec_decode_num_accepted_tokens_total": (
        "Draft tokens accepted.",
        lambda stats: stats.accepted_tokens,
    ),
}
"""Counters to which the statistics of each request are added when the request ends."""
REASONS = {"cancelled": "abort"}
"""Maps our finish reasons to vLLM's names where the names differ."""
FIRST_TOKEN = [
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
]


class Metrics:
    """Counters, gauges and a histogram with the model's name and version as labels.

    Triton's stub crashes if two threads change metrics at once, so one lock guards all of them.
    """

    def __init__(self, model: str, version: str) -> None:
        self._labels = {"model": model, "version": version}
        self._lock = Lock()
        self._made: dict[tuple[str, ...], Any] = {}
        self._families: dict[str, Any] = {}
        self._load = (-1, -1)

    def ended(self, reason: str, stats: Stats) -> None:
        """Count a request that ended."""
        with self._lock:
            reason = REASONS.get(reason, reason)
            self._metric(
                "request_success_total",
                "Requests that ended, by the reason.",
                finished_reason=reason,
            ).increment(1)
            for name, (text, count) in COUNTERS.items():
                if amount := count(stats):
                    self._metric(name, text).increment(amount)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        with self._lock:
            self._metric(
                "time_to_first_token_seconds", "Time until the first token.", "HISTOGRAM"
            ).observe(seconds)

    def load(self, service: Service) -> None:
        """Record the load of the batch."""
        now = service.load()
        load = now.running + now.prefilling, now.queued
        if load == self._load:
            return
        with self._lock:
            self._load = load
            self._metric("num_requests_running", "Requests in the batch.", "GAUGE").set(load[0])
            self._metric("num_requests_waiting", "Requests in the queue.", "GAUGE").set(load[1])

    def _metric(self, name: str, text: str, kind: str = "COUNTER", **labels: str) -> Any:
        """Return a metric, which is made when it is first used. The caller holds the lock."""
        key = (name, *labels.values())
        if key not in self._made:
            if name not in self._families:
                number = getattr(pb_utils.MetricFamily, kind)
                self._families[name] = pb_utils.MetricFamily(
                    name=f"vllm:{name}", description=text, kind=number
                )
            family = self._families[name]
            buckets = {"buckets": FIRST_TOKEN} if kind == "HISTOGRAM" else {}
            self._made[key] = family.Metric(labels=self._labels | labels, **buckets)
        return self._made[key]
