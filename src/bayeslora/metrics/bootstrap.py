"""Percentile bootstrap: intervals of a metric measured on N rows, and paired comparisons of two models.

Rows are drawn with replacement and the metric is computed anew, many times; the interval spans the middle
``level`` of those values (order statistics, not interpolated, so that an infinite log-loss stays an
answer).

A metric must be defined on every resample: if it raises, such as an AUROC without a single error, the exception
is propagated. Metrics that are sums over rows (accuracy, log-loss, Brier score, calibration error) are computed for all
resamples at once; others call by call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.calibration import BINS, bin_of, ece
from bayeslora.metrics.scores import accuracy, brier, label_probability, nll, squared_error, top_class
from bayeslora.metrics.validation import check_classification, check_count, check_open_share

Metric = Callable[[NDArray[Any], NDArray[Any]], float]
"""A function of ``probs [N, C]`` and ``labels [N]``, such as :func:`bayeslora.metrics.ece`."""


@dataclass(frozen=True)
class Interval:
    """A metric on all rows and the bounds of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """A metric of model a minus that of model b, the bounds of its interval, and a two-sided p-value."""

    difference: float
    low: float
    high: float
    p_value: float


def bootstrap_interval(
    metric: Metric,
    probs: ArrayLike,
    labels: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of ``metric`` on these rows."""
    return bootstrap_interval_over_runs(metric, [probs], labels, level=level, resamples=resamples, seed=seed)


def bootstrap_interval_over_runs(
    metric: Metric,
    runs: Sequence[ArrayLike],
    labels: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile interval for a method with several runs: the metric is averaged over the runs.

    Rows and runs are drawn with replacement, so the interval covers both questions and seeds. All runs use the
    same resample of the rows.
    """
    if len(runs) == 0:
        raise ValueError("need at least one run, got none")
    checked = [check_classification(probs, labels) for probs in runs]
    level = check_open_share(level, "level")
    mean = _Mean(metric, [probs for probs, _ in checked], checked[0][1])
    (draws,) = _resample([mean], resamples, seed)
    return Interval(mean(slice(None)), *_middle(draws, level))


def paired_bootstrap(
    metric: Metric,
    probs_a: ArrayLike,
    probs_b: ArrayLike,
    labels: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> PairedDifference:
    """Compare two models on the same rows: ``metric(a) − metric(b)``.

    Both are evaluated on the same resamples, so that what makes a row hard for either cancels. With ``R``
    resampled differences ``d`` the p-value is

        min(1,  2 · min(#{d ≤ 0} + 1, #{d ≥ 0} + 1) / (R + 1)),

    where the added 1 keeps it from being 0, which ``R`` resamples cannot show.
    """
    return paired_bootstrap_over_runs(metric, [probs_a], [probs_b], labels, level=level, resamples=resamples, seed=seed)


def paired_bootstrap_over_runs(
    metric: Metric,
    runs_a: Sequence[ArrayLike],
    runs_b: Sequence[ArrayLike],
    labels: ArrayLike,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> PairedDifference:
    """Compare two methods with several runs each, as in :func:`bootstrap_interval_over_runs`.

    If both have equally many runs, these are assumed to share seeds in the same order, and the same seeds are drawn for both.
    """
    if len(runs_a) == 0 or len(runs_b) == 0:
        raise ValueError(f"need at least one run of each, got {len(runs_a)} and {len(runs_b)}")
    checked = [check_classification(probs, labels, "probs_a") for probs in runs_a]
    a, y = [probs for probs, _ in checked], checked[0][1]
    b = [check_classification(probs, labels, "probs_b")[0] for probs in runs_b]
    for other in (*a, *b):
        if other.shape != a[0].shape:
            raise ValueError(f"probs_a and probs_b must have the same shape, got {a[0].shape} and {other.shape}")
    level = check_open_share(level, "level")
    mean_a, mean_b = _Mean(metric, a, y), _Mean(metric, b, y)
    draws = _differences(*_resample([mean_a, mean_b], resamples, seed))
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    everywhere = slice(None)
    return PairedDifference(mean_a(everywhere) - mean_b(everywhere), *_middle(draws, level), p_value)


def _nlls(probs: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return -np.log(label_probability(probs, labels).astype(np.float64))[:, None]


def _gaps_by_bin(probs: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    confidence, correct = top_class(probs, labels)
    gaps = np.zeros((len(labels), BINS))
    gaps[np.arange(len(labels)), bin_of(confidence, BINS)] = correct - confidence.astype(np.float64)
    return gaps


_TERMS: dict[Metric, Callable[[NDArray[Any], NDArray[Any]], NDArray[np.float64]]] = {
    accuracy: lambda probs, labels: top_class(probs, labels)[1][:, None].astype(np.float64),
    nll: _nlls,
    brier: lambda probs, labels: squared_error(probs, labels)[:, None],
    ece: _gaps_by_bin,
}
"""Metrics that are ``Σ_b |Σ_i x_ib| / N``, by their terms ``x [N, B]``."""


@dataclass(frozen=True)
class _Mean:
    """A metric on some of the rows, averaged over runs."""

    metric: Metric
    runs: Sequence[NDArray[Any]]
    labels: NDArray[Any]

    def __call__(self, rows: NDArray[np.int64] | slice, weights: NDArray[np.float64] | None = None) -> float:
        """Without weights every run counts the same."""
        wanted = np.ones(len(self.runs)) if weights is None else weights
        drawn = [(probs, weight) for probs, weight in zip(self.runs, wanted, strict=True) if weight]
        values = [float(self.metric(probs[rows], self.labels[rows])) for probs, _ in drawn]
        return float(np.average(values, weights=[weight for _, weight in drawn]))

    def terms(self) -> NDArray[np.float64] | None:
        """Terms of all runs, ``[N, runs, B]``; ``None`` if the metric has no such form, or some are infinite."""
        if self.metric not in _TERMS:
            return None
        terms = np.stack([_TERMS[self.metric](probs, self.labels) for probs in self.runs], axis=1)
        return terms if np.isfinite(terms).all() else None


_ROUNDING = 1e-12
"""Rounding makes two means differ by less than this, or this times the larger of them if that is above 1."""

_AT_ONCE = 2**22
"""Rows of resamples in memory at once."""


def _resample(means: Sequence[_Mean], resamples: int, seed: int) -> list[NDArray[np.float64]]:
    """Evaluate each mean on the same ``resamples`` draws of rows, and of runs, with replacement."""
    rng, n = np.random.default_rng(seed), len(means[0].labels)
    rounds = check_count(resamples, "resamples")
    values = [np.empty(rounds) for _ in means]
    terms = [mean.terms() for mean in means]
    weights = [_draw_runs(len(mean.runs), rounds, seed) for mean in means]
    at_once = max(1, _AT_ONCE // n)
    for first in range(0, rounds, at_once):
        drawn = [rng.integers(n, size=n) for _ in range(first, min(first + at_once, rounds))]
        part = slice(first, first + len(drawn))
        counts = np.stack([np.bincount(rows, minlength=n) for rows in drawn]).astype(np.float64)
        for found, mean, own, weight in zip(values, means, terms, weights, strict=True):
            if own is None:
                found[part] = [mean(rows, some) for rows, some in zip(drawn, weight[part], strict=True)]
            else:
                sums = (counts @ own.reshape(n, -1)).reshape(len(drawn), *own.shape[1:])
                found[part] = (np.abs(sums).sum(axis=-1) * weight[part]).sum(axis=-1) / n
    for found in values:
        _require_numbers(found)
    return values


def _draw_runs(count: int, rounds: int, seed: int) -> NDArray[np.float64]:
    """Weights ``[rounds, runs]`` of runs drawn with replacement; equal for equal ``count``."""
    drawn = np.random.default_rng([seed, count]).multinomial(count, np.full(count, 1 / count), size=rounds)
    return drawn / count


def _differences(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """``a − b``, and 0 where that is within the rounding of sums, so that ties count on both sides."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity is refused below
        draws = np.subtract(a, b)
    _require_numbers(draws)
    draws[np.abs(draws) < _ROUNDING * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))] = 0.0
    return draws


def _require_numbers(draws: NDArray[np.float64]) -> None:
    if np.isnan(draws).any():
        raise ValueError("the metric was not a number on some resample (infinity minus infinity?)")


def _middle(draws: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Bounds of the middle ``level`` of the draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)
