"""Thresholds for abstention and for prediction sets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.errors import InputError
from bayeslora.metrics import conformal_threshold, risk_coverage, threshold_for_coverage, threshold_for_risk
from bayeslora.metrics.scores import top_class
from bayeslora.metrics.validation import BoolArray, check_classification
from bayeslora.number_checks import check_number

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Levels of prediction sets."""


class Unreached(InputError):
    """No threshold reaches the target; the message says what is possible."""


@dataclass(frozen=True)
class Threshold:
    """A confidence threshold, and its results on the data it was chosen on.

    Attributes:
        confidence: abstain if the largest probability is below it.
        coverage: share of the questions answered.
        error_rate: share of wrong answers among those.
        target: the target, in words.
    """

    confidence: float
    coverage: float
    error_rate: float
    target: str


def conformal_thresholds(
    probabilities: ArrayLike, labels: ArrayLike, levels: Iterable[float] = LEVELS
) -> dict[str, float]:
    """Thresholds of :func:`bayeslora.metrics.conformal_threshold` by level, without levels that need more rows.

    With ``n`` rows at most ``n / (n + 1)`` can be guaranteed: above that, every set would contain every option.
    """
    found = {f"{level:g}": conformal_threshold(probabilities, labels, level) for level in levels}
    return {level: min(1.0, threshold) for level, threshold in found.items() if math.isfinite(threshold)}


def choose_threshold(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    error_rate: float | None = None,
    coverage: float | None = None,
) -> Threshold:
    """Choose the confidence threshold for one of two targets.

    With ``error_rate`` at most that share of the answers is wrong, at the largest possible coverage; a rate that no
    threshold reaches is refused. With ``coverage`` at least that share is answered, the most confident first, and more only
    for ties in confidence, which are answered all or none.

    Both hold exactly on the given rows, and only roughly on new ones of the same kind: the fewer rows are answered,
    the noisier their error rate.

    Args:
        probabilities: ``[N, O]``, calibrated as they will be when the threshold is used.
        labels: ``[N]``.
        error_rate: greatest share of wrong answers among those given, from 0 to 1.
        coverage: least share of questions answered, above 0 and at most 1.
    """
    confidence, correct = top_class(*check_classification(probabilities, labels, "probabilities"))
    return threshold_for(confidence, correct, error_rate=error_rate, coverage=coverage)


def threshold_for(
    confidence: ArrayLike, correct: ArrayLike, *, error_rate: float | None = None, coverage: float | None = None
) -> Threshold:
    """:func:`choose_threshold` for any confidence ``[N]`` of answers of which ``correct [N]`` are right."""
    confidence, correct = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=bool)
    target = describe_target(error_rate, coverage)
    if error_rate is not None:
        threshold = threshold_for_risk(confidence, correct, error_rate)
    else:
        assert coverage is not None
        threshold = threshold_for_coverage(confidence, coverage)
    if math.isinf(threshold):
        raise Unreached(f"an {target} is not reached: {_least_error(confidence, correct)}; ask for that or more")
    answered = confidence >= threshold
    return Threshold(threshold, float(answered.mean()), float((~correct[answered]).mean()), target)


def describe_target(error_rate: float | None, coverage: float | None) -> str:
    """Describe the target of :func:`choose_threshold` in words; refuse invalid targets."""
    if error_rate is not None and coverage is None:
        check_number("error_rate", error_rate, least=0, most=1)
        return f"error rate of at most {error_rate:g}"
    if coverage is not None and error_rate is None:
        check_number("coverage", coverage, above=0, most=1)
        return f"coverage of at least {coverage:g}"
    raise InputError(f"got error_rate={error_rate} and coverage={coverage}; give exactly one of the two")


def _least_error(confidence: NDArray[np.floating[Any]], correct: BoolArray) -> str:
    """Describe the least error rate of any threshold, at the largest coverage that reaches it."""
    curve = risk_coverage(confidence, correct)
    best = np.flatnonzero(curve.risk == curve.risk.min())[-1]
    risk = math.ceil(1e4 * curve.risk[best]) / 1e4  # rounded up, so that asking for it succeeds
    return f"the least is {risk:g}, answering {curve.coverage[best]:.1%} of {len(correct)} questions"
