"""Figures for Prometheus, in its text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 4, 8, 16, 32)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Count:
    """A number that only grows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self, amount: int = 1) -> None:
        """Count so many more."""
        with self._lock:
            self.value += amount


class Histogram:
    """How often values were at most so large."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._lock = threading.Lock()
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self, name: str, label: str) -> Iterator[str]:
        """As Prometheus reads it; every bucket holds the smaller ones too."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        for bound, count in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), counts, strict=True):
            so_far += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {so_far}'
        yield f"{name}_sum{{{label}}} {total:.9g}"
        yield f"{name}_count{{{label}}} {so_far}"


class Metrics:
    """What the server has done so far.

    Args:
        paths: of the endpoints; requests for others are counted as ``other``, so that nobody can make it grow.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.depth: Callable[[], int] = lambda: 0
        self.answers = Count()
        self.prompt_tokens = Count()
        self.written_tokens = Count()
        self.batches = {kind: Histogram(SIZES) for kind in ("choices", "texts")}
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = {path: Histogram(SECONDS) for path in (*paths, "other")}

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request that was answered. Called by one thread only, that of the event loop."""
        known = path if path in self._seconds else "other"
        self._requests[known, status] += 1
        self._seconds[known].observe(seconds)

    def text(self) -> str:
        """All of it as Prometheus reads it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests by path and status.")
        for (path, status), count in sorted(self._requests.items()):
            yield f'bayeslora_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from _head("request_seconds", "histogram", "Seconds from a request to the end of its answer.")
        for path, seconds in self._seconds.items():
            yield from seconds.lines("bayeslora_request_seconds", f'path="{path}"')
        yield from _head("batch_size", "histogram", "Requests that were computed together.")
        for kind, sizes in self.batches.items():
            yield from sizes.lines("bayeslora_batch_size", f'kind="{kind}"')
        yield from _single("queue_depth", "gauge", "Requests that wait.", self.depth())
        yield from _single("answers_total", "counter", "Questions answered.", self.answers.value)
        yield from _single("prompt_tokens_total", "counter", "Tokens of texts read.", self.prompt_tokens.value)
        yield from _single("written_tokens_total", "counter", "Tokens written.", self.written_tokens.value)


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP bayeslora_{name} {meaning}"
    yield f"# TYPE bayeslora_{name} {kind}"


def _single(name: str, kind: str, meaning: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, meaning)
    yield f"bayeslora_{name} {value:g}" if isinstance(value, float) else f"bayeslora_{name} {value}"
