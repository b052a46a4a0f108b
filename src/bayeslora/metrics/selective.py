"""Selective prediction: how well confidence separates right from wrong answers, and which threshold to use.

``confidence [N]`` is any score that is higher where the model is surer (the largest probability, minus
the entropy, ...) and ``correct [N]`` says which answers were right. A threshold ``t`` accepts the rows
with ``confidence >= t``; coverage is the share accepted, risk the share of errors among them.

Rows of equal confidence are indistinguishable, so no number here depends on their order. A threshold
accepts all of them or none; where ``k`` rows must be taken from within such a group, the expectation over
random orders counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.scores import top_class
from bayeslora.metrics.validation import (
    BoolArray,
    FloatArray,
    check_classification,
    check_outcomes,
    check_scores,
    share_to_count,
)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """One point per distinct confidence, from the highest down.

    Attributes:
        threshold: ``[K]``, the distinct confidences, falling.
        coverage: ``[K]``, share of rows with confidence of at least the threshold, rising to 1.
        risk: ``[K]``, share of errors among those rows; the last is the overall error.
    """

    threshold: FloatArray
    coverage: NDArray[np.float64]
    risk: NDArray[np.float64]


def auroc(scores: ArrayLike, positives: ArrayLike) -> float:
    """Probability that a random positive scores above a random negative, equal scores counting half.

    From mid-ranks: ``(Σ rank of positives − n₊(n₊+1)/2) / (n₊ n₋)``.
    """
    s, positive = check_outcomes(scores, positives, ("scores", "positives"))
    n_pos = int(positive.sum())
    n_neg = len(positive) - n_pos
    if n_pos == 0 or n_neg == 0:
        raise ValueError(f"AUROC needs both classes, got {n_pos} positives and {n_neg} negatives")
    _, group, size = np.unique(s, return_inverse=True, return_counts=True)
    mid_rank = np.cumsum(size) - (size - 1) / 2
    surplus = mid_rank[group[positive]].sum() - n_pos * (n_pos + 1) / 2
    return float(surplus / (n_pos * n_neg))


def shift_auroc(own: ArrayLike, shifted: ArrayLike) -> float:
    """:func:`auroc` of a score, such as an uncertainty, as a detector of out-of-distribution questions.

    Args:
        own: ``[N]``, scores of in-distribution questions.
        shifted: ``[M]``, scores of shifted questions, which should be higher.
    """
    inside, outside = check_scores(own, "own"), check_scores(shifted, "shifted")
    return auroc(np.concatenate([inside, outside]), np.arange(len(inside) + len(outside)) >= len(inside))


def confidence_auroc(probs: ArrayLike, labels: ArrayLike) -> float:
    """:func:`auroc` of the largest probability as a detector of right answers; 0.5 is chance."""
    return auroc(*top_class(*check_classification(probs, labels)))


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Risk-coverage curve: the error rate at every coverage."""
    s, right = check_outcomes(confidence, correct)
    threshold, accepted, errors = _accepted_errors(s, right)
    return RiskCoverage(threshold, accepted / len(s), errors / accepted)


def aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Area under the risk-coverage curve: mean over ``k = 1..N`` of the risk among the ``k`` most confident.

    Equal confidences count by their expectation over random orders. Lower is better; confidence that says
    nothing gives the overall error.
    """
    s, right = check_outcomes(confidence, correct)
    k = np.arange(1, len(s) + 1)
    return float(np.mean(_expected_errors(s, right, k) / k))


def accuracy_at_coverage(confidence: ArrayLike, correct: ArrayLike, coverage: float) -> float:
    """Accuracy among the ``⌈coverage · N⌉`` most confident rows, equal ones by expectation."""
    s, right = check_outcomes(confidence, correct)
    k = share_to_count(coverage, len(s), "coverage")
    return float(1.0 - _expected_errors(s, right, np.array([k]))[0] / k)


def threshold_for_risk(confidence: ArrayLike, correct: ArrayLike, max_risk: float) -> float:
    """The threshold of largest coverage whose risk is at most ``max_risk``.

    Risk need not fall as the threshold rises, so this is the smallest threshold that keeps the bound,
    though some above it may break it. If none does, the result is infinity: accept nothing. The bound
    holds on the rows given, not with any guarantee on others.
    """
    if not 0 <= max_risk <= 1:
        raise ValueError(f"max_risk must be from 0 to 1, got {max_risk}")
    curve = risk_coverage(confidence, correct)
    allowed = curve.threshold[curve.risk <= max_risk]
    return float(allowed[-1]) if len(allowed) else math.inf


def threshold_for_coverage(confidence: ArrayLike, coverage: float) -> float:
    """The largest threshold that accepts at least the share ``coverage`` of rows."""
    s = check_scores(confidence, "confidence")
    k = share_to_count(coverage, len(s), "coverage")
    return float(np.sort(s)[-k])


def _accepted_errors(
    confidence: FloatArray, correct: BoolArray
) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.float64]]:
    """Distinct confidences from the highest down, with rows accepted and errors made at each."""
    rising, group, size = np.unique(confidence, return_inverse=True, return_counts=True)
    errors = np.bincount(group, weights=~correct)
    return rising[::-1], np.cumsum(size[::-1]), np.cumsum(errors[::-1])


def _expected_errors(confidence: FloatArray, correct: BoolArray, k: NDArray[np.int64]) -> NDArray[np.float64]:
    """Errors expected among the ``k`` most confident: linear in ``k`` within a group of equals."""
    _, accepted, errors = _accepted_errors(confidence, correct)
    return np.asarray(np.interp(k, np.append(0, accepted), np.append(0.0, errors)))
