"""How far to trust a metric measured on N rows: percentile bootstrap, for one model or two compared.

Rows are drawn with replacement and the metric is computed anew, many times; the interval spans the middle
``level`` of those values (order statistics, not interpolated, so that an infinite log-loss stays an
answer).

A metric must be defined on every resample: one that raises, such as an AUROC without a single error, ends
the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    """The same for a method that was run several times: the metric is averaged over the runs.

    All runs see the same resample of the rows. So the interval is about the questions and not about the seeds.
    """
    if not runs:
        raise ValueError("need at least one run, got none")
    checked = [check_classification(probs, labels) for probs in runs]
    level = check_open_share(level, "level")
    mean = _Mean(metric, [probs for probs, _ in checked], checked[0][1])
    draws = _resample(mean, len(mean.labels), resamples, seed)
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
    """The same for two methods that were each run several times, as in :func:`bootstrap_interval_over_runs`."""
    if not runs_a or not runs_b:
        raise ValueError(f"need at least one run of each, got {len(runs_a)} and {len(runs_b)}")
    checked = [check_classification(probs, labels, "probs_a") for probs in runs_a]
    a, y = [probs for probs, _ in checked], checked[0][1]
    b = [check_classification(probs, labels, "probs_b")[0] for probs in runs_b]
    for other in (*a, *b):
        if other.shape != a[0].shape:
            raise ValueError(f"probs_a and probs_b must have the same shape, got {a[0].shape} and {other.shape}")
    level = check_open_share(level, "level")
    mean_a, mean_b = _Mean(metric, a, y), _Mean(metric, b, y)

    def difference(rows: NDArray[np.int64] | slice) -> float:
        return mean_a(rows) - mean_b(rows)

    draws = _resample(difference, len(y), resamples, seed)
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p_value = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    return PairedDifference(difference(slice(None)), *_middle(draws, level), p_value)


@dataclass(frozen=True)
class _Mean:
    """A metric on some of the rows, averaged over runs."""

    metric: Metric
    runs: Sequence[NDArray[Any]]
    labels: NDArray[Any]

    def __call__(self, rows: NDArray[np.int64] | slice) -> float:
        return float(np.mean([float(self.metric(probs[rows], self.labels[rows])) for probs in self.runs]))


def _resample(
    statistic: Callable[[NDArray[np.int64]], float], n: int, resamples: int, seed: int
) -> NDArray[np.float64]:
    """The statistic on ``resamples`` draws of ``n`` rows with replacement."""
    rng = np.random.default_rng(seed)
    rounds = range(check_count(resamples, "resamples"))
    values = np.array([float(statistic(rng.integers(n, size=n))) for _ in rounds])
    if np.isnan(values).any():
        raise ValueError("the metric was not a number on some resample (infinity minus infinity?)")
    return values


def _middle(draws: NDArray[np.float64], level: float) -> tuple[float, float]:
    """Bounds of the middle ``level`` of the draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="inverted_cdf")
    return float(low), float(high)
