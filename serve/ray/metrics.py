"""Metrics by Ray's own way: it collects them from every process, so they do not depend on which one
answers."""

from typing import Any

from ray.serve import metrics

from eesd.runtime.batch.service import Load, Service
from eesd.serve.http.errors import APIError
from eesd.serve.http.metrics import COUNTERS, GAUGES, Metrics


class _Bound:
    """A metric of Ray with the values of its labels."""

    def __init__(self, metric: Any, tags: dict[str, str]) -> None:
        self._metric, self._tags = metric, tags

    def inc(self, amount: float = 1) -> None:
        if amount > 0:  # Ray takes no nothing
            self._metric.inc(amount, dict(self._tags))

    def set(self, value: float) -> None:
        self._metric.set(value, dict(self._tags))

    def observe(self, value: float) -> None:
        self._metric.observe(value, dict(self._tags))


class _Family:
    """A metric of Ray whose labels have no values yet."""

    def __init__(self, make: Any, name: str, text: str, labels: list[str], **more: Any) -> None:
        self._labels = tuple(labels)
        # Ray allows no colons, and adds ray_ in front. vLLM on Ray names its metrics alike.
        self._metric = make(name.replace(":", "_"), description=text, tag_keys=self._labels, **more)

    def labels(self, *values: object) -> _Bound:
        return _Bound(self._metric, dict(zip(self._labels, map(str, values), strict=True)))


class RayMetrics(Metrics):
    """The metrics of a process that answers HTTP, without those of the batch: see
    :class:`LoadMetrics`."""

    def counter(self, name: str, text: str, labels: list[str]) -> _Family:
        return _Family(metrics.Counter, name, text, labels)

    def gauge(self, name: str, text: str, labels: list[str]) -> _Family:
        return _Family(metrics.Gauge, name, text, labels)

    def histogram(
        self, name: str, text: str, labels: list[str], buckets: tuple[float, ...]
    ) -> _Family:
        return _Family(metrics.Histogram, name, text, labels, boundaries=list(buckets))

    def text(self) -> bytes:
        message = (
            "Ray has the metrics of all processes; ask the metrics port of each node "
            "(--metrics-export-port of ray start)."
        )
        raise APIError(404, message, code="metrics_elsewhere")


class LoadMetrics:
    """What the batch of a replica says of itself."""

    def __init__(self, model: str) -> None:
        self._gauges = {
            name: _Family(metrics.Gauge, name, text, ["model_name"]).labels(model)
            for name, (text, _) in GAUGES.items()
        }
        self._counters = {
            name: _Family(metrics.Counter, name, text, ["model_name"]).labels(model)
            for name, (text, _) in COUNTERS.items()
        }
        self._before = Load()

    def note(self, service: Service) -> None:
        """Tell Ray how it is now."""
        load = service.load()
        for name, (_, value) in GAUGES.items():
            self._gauges[name].set(float(value(load)))
        for name, (_, count) in COUNTERS.items():
            self._counters[name].inc(count(load) - count(self._before))
        self._before = load
