"""Metrics for Prometheus, in its text format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 16, 32)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts the server's requests, batches and tokens.

    Args:
        paths: of the endpoints; others are counted as ``other``, so that clients cannot add labels.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._registry = _Registry()
        ours: dict[str, Any] = {"namespace": "bayeslora", "registry": self._registry}
        self._requests = Counter("requests", "Requests by path and status.", ["path", "status"], **ours)
        seconds = Histogram(
            "request_seconds", "Request duration, until the end of the response.", ["path"], buckets=SECONDS, **ours
        )
        self._seconds = {path: seconds.labels(path) for path in (*paths, "other")}
        sizes = Histogram("batch_size", "Requests per batch.", ["kind"], buckets=SIZES, **ours)
        self.batches = {kind: sizes.labels(kind) for kind in ("choices", "texts")}
        self.depth = Gauge("queue_depth", "Queued requests.", **ours)
        self.answers = Counter("answers", "Questions answered.", **ours)
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens processed.", **ours)
        self.written_tokens = Counter("written_tokens", "Tokens generated.", **ours)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Record a finished request."""
        known = path if path in self._seconds else "other"
        self._requests.labels(known, status).inc()
        self._seconds[known].observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Registry(CollectorRegistry):
    """Omits creation times, and formats bucket bounds as Go does: ``1``, not ``1.0``."""

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        for metric in super().collect():
            metric.samples = [
                sample._replace(labels={name: _short(name, value) for name, value in sample.labels.items()})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def _short(label: str, value: str) -> str:
    return value.removesuffix(".0") if label == "le" else value
