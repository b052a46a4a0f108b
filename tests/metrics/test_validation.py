"""Every error: what is given, and what the message must say of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bayeslora.metrics as m

P = [[0.5, 0.5], [0.2, 0.8], [1.0, 0.0]]
Y = [0, 1, 0]
Call = Callable[[], Any]

CLASSIFICATION = [m.accuracy, m.nll, m.brier, m.ece, m.adaptive_ece, m.classwise_ece, m.reliability_bins]
CLASSIFICATION += [m.confidence_auroc, m.conformal_threshold]
CLASSIFICATION += [lambda p, y: m.bootstrap_interval(m.nll, p, y, resamples=2)]
CLASSIFICATION += [lambda p, y: m.paired_bootstrap(m.nll, p, p, y, resamples=2)]


def metric_id(metric: Any) -> str:
    return str(getattr(metric, "__name__", metric))


@pytest.mark.parametrize("metric", CLASSIFICATION, ids=metric_id)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        ([0.5, 0.5], Y, "must have shape [N, C], got shape (2,)"),
        ([[P]], Y, "must have shape [N, C], got shape (1, 1, 3, 2)"),
        (np.zeros((0, 2)), [], "is empty: got shape (0, 2)"),
        (np.zeros((3, 0)), Y, "is empty: got shape (3, 0)"),
        ([[0.5, 0.5], [math.nan, 0.8], [1, 0]], Y, "must be finite, got value nan at index (1, 0)"),
        ([[0.5, 0.5], [0.2, 0.8], [math.inf, 0]], Y, "must be finite, got value inf at index (2, 0)"),
        ([[0.5, 0.5], [1.5, -0.5], [1, 0]], Y, "must not be negative, got value -0.5 at index (1, 1)"),
        ([[0.5, 0.5], [0.2, 0.8], [0.7, 0.0]], Y, "sum to 1 within 0.0001 (logits need"),
        ([[0.5, 0.5], [0.2, 0.8], [0.75, 0.0]], Y, "got sum 0.75 at row 2"),
        ([[0.5, 0.5002], [0.2, 0.8], [1, 0]], Y, "got sum 1.0002 at row 0"),
        ([["a", "b"]], [0], "must be real numbers, got dtype <U1"),
        (np.ones((1, 1), dtype=complex), [0], "must be real numbers, got dtype complex128"),
        (np.ones((1, 1), dtype=bool), [0], "must be real numbers, got dtype bool"),
    ],
)
def test_bad_probabilities(metric: Callable[..., Any], probs: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        metric(probs, labels)


@pytest.mark.parametrize("metric", [*CLASSIFICATION, lambda p, y: m.set_coverage(np.array(p) > 0, y)])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], "labels must have shape (3,), one per row, got shape (2,)"),
        ([[0], [1], [0]], "labels must have shape (3,), one per row, got shape (3, 1)"),
        (0, "labels must have shape (3,), one per row, got shape ()"),
        ([0.0, 1.0, 0.0], "labels must be integers, got dtype float64"),
        ([False, True, False], "labels must be integers, got dtype bool"),
        ([0, 2, 0], "labels must be from 0 to 1, got value 2 at row 1"),
        ([0, 1, -100], "labels must be from 0 to 1, got value -100 at row 2"),
    ],
)
def test_bad_labels(metric: Callable[..., Any], labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        metric(P, labels)


PAIRS = [m.ece_from_confidence, m.reliability_bins_from_confidence, m.risk_coverage, m.aurc]
PAIRS += [lambda c, r: m.accuracy_at_coverage(c, r, 0.5), lambda c, r: m.threshold_for_risk(c, r, 0.5)]


@pytest.mark.parametrize("metric", PAIRS, ids=metric_id)
@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (P, Y, "confidence must have shape [N], got shape (3, 2)"),
        ([], [], "confidence is empty"),
        ([0.5, math.nan], [0, 1], "confidence must be finite, got value nan at row 1"),
        (["a"], [True], "confidence must be real numbers, got dtype <U1"),
        ([0.5, 0.6], [True], "correct must have shape (2,), got shape (1,)"),
        ([0.5, 0.6], [1.0, 0.0], "correct must be booleans (or integers 0 and 1), got dtype float64"),
        ([0.5, 0.6], [1, 2], "correct must be booleans (or integers 0 and 1), got value 2 at row 1"),
    ],
)
def test_bad_pairs(metric: Callable[..., Any], confidence: Any, correct: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        metric(confidence, correct)


@pytest.mark.parametrize("bins", [0, -3, 2.0, True, "15"])
@pytest.mark.parametrize("metric", [m.ece, m.adaptive_ece, m.classwise_ece, m.reliability_bins])
def test_bad_number_of_bins(metric: Callable[..., Any], bins: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"bins must be an integer of at least 1, got {bins!r}")):
        metric(P, Y, bins)


OTHER: list[tuple[Call, str]] = [
    # confidence as a probability
    (lambda: m.ece_from_confidence([0.5, 1.2], [0, 1]), "confidence must be from 0 to 1, got value 1.2"),
    (lambda: m.ece_from_confidence([-0.1, 1.0], [0, 1]), "confidence must be from 0 to 1, got value -0.1"),
    (lambda: m.ece_from_confidence([0.5], [True], bins=0), "bins must be an integer of at least 1, got 0"),
    # present options
    (
        lambda: m.classwise_ece(P, Y, present=[[True, True]]),
        "present must have shape (3, 2), got shape (1, 2)",
    ),
    (lambda: m.classwise_ece(P, Y, present=np.ones((3, 2))), "present must be booleans"),
    (
        lambda: m.classwise_ece(P, Y, present=[[1, 1], [0, 1], [1, 0]]),
        "options that are not present must have probability 0, got value 0.2 at index (1, 0)",
    ),
    (
        lambda: m.classwise_ece(P, [0, 1, 1], present=np.array(P) > 0),
        "labels must be options that are present, got value 1 at row 2",
    ),
    (lambda: m.conformal_sets(P, 0.5, present=[True]), "present must have shape (3, 2), got shape (1,)"),
    # entropy
    (lambda: m.entropy(0.5), "probs must have shape [..., C], got shape ()"),
    (lambda: m.entropy([]), "probs is empty: got shape (0,)"),
    (lambda: m.entropy([[[0.5, 0.5], [0.5, 0.4]]]), "got sum 0.9 at index (0, 1)"),
    (lambda: m.entropy_split(P), "draws must have shape [n, N, C], got shape (3, 2)"),
    (lambda: m.entropy_split(np.zeros((0, 3, 2))), "draws is empty: got shape (0, 3, 2)"),
    # selective
    (lambda: m.auroc([0.1, 0.2], [True, True]), "AUROC needs both classes, got 2 positives and 0 negatives"),
    (lambda: m.auroc([0.1, 0.2], [0, 0]), "AUROC needs both classes, got 0 positives and 2 negatives"),
    (lambda: m.auroc([math.inf, 0.2], [0, 1]), "scores must be finite, got value inf at row 0"),
    (lambda: m.auroc([0.1, 0.2], [0.0, 1.0]), "positives must be booleans"),
    (lambda: m.confidence_auroc([[1.0, 0.0]], [0]), "AUROC needs both classes, got 1 positives"),
    (lambda: m.accuracy_at_coverage([0.5], [1], 0.0), "coverage must be above 0 and at most 1, got 0.0"),
    (lambda: m.accuracy_at_coverage([0.5], [1], 1.1), "coverage must be above 0 and at most 1, got 1.1"),
    (lambda: m.threshold_for_coverage([0.5], math.nan), "coverage must be above 0 and at most 1, got nan"),
    (lambda: m.threshold_for_coverage([], 0.5), "confidence is empty"),
    (lambda: m.threshold_for_risk([0.5], [1], -0.1), "max_risk must be from 0 to 1, got -0.1"),
    (lambda: m.threshold_for_risk([0.5], [1], 1.1), "max_risk must be from 0 to 1, got 1.1"),
    # conformal
    (lambda: m.conformal_threshold(P, Y, level=1.0), "level must be between 0 and 1, both excluded, got 1.0"),
    (lambda: m.conformal_threshold(P, Y, level=0.0), "level must be between 0 and 1, both excluded, got 0.0"),
    (lambda: m.conformal_sets(P, math.nan), "threshold must be a number, got nan"),
    (lambda: m.conformal_sets([0.5, 0.5], 0.5), "probs must have shape [N, C], got shape (2,)"),
    (
        lambda: m.mean_set_size(P),
        "sets must be booleans [N, C], not empty, got shape (3, 2) and dtype float64",
    ),
    (lambda: m.mean_set_size([True]), "sets must be booleans [N, C], not empty, got shape (1,)"),
    (lambda: m.mean_set_size(np.zeros((0, 2), dtype=bool)), "not empty, got shape (0, 2)"),
    # tokens
    (lambda: m.token_scores([0.5, 0.5], [0]), "probs must have shape [..., T, V], got shape (2,)"),
    (lambda: m.token_scores([P], Y), "labels must have shape (1, 3), one per token, got shape (3,)"),
    (lambda: m.token_scores(P, [0, 1, 0.0]), "labels must be integers, got dtype float64"),
    (lambda: m.token_scores(P, [0, 1, -100]), "labels must be from 0 to 1, got value -100 at row 2"),
    (lambda: m.token_scores(P, Y, [True]), "mask must have shape (3,), got shape (1,)"),
    (lambda: m.token_scores(P, Y, [1, 2, 0]), "mask must be booleans (or integers 0 and 1), got value 2"),
    (lambda: m.token_scores([[0.5, 0.4]], [0]), "rows of unmasked probs must sum to 1"),
    (lambda: m.token_scores([[1.5, -0.5]], [0]), "unmasked probs must not be negative, got value -0.5"),
    (lambda: m.token_scores([[math.nan, 1]], [0]), "unmasked probs must be finite, got value nan"),
    (lambda: m.TokenScores.concatenate([]), "no chunks given"),
    (lambda: m.token_scores(P, Y).subset([True]), "mask must have shape (3,), got shape (1,)"),
    (lambda: m.token_scores(P, Y, [0, 0, 0]).nll, "there are no tokens"),
    (lambda: m.token_scores(P, Y, [0, 0, 0]).accuracy, "there are no tokens"),
    (lambda: m.token_scores(P, Y, [0, 0, 0]).brier_score, "there are no tokens"),
    (lambda: m.token_scores(P, Y, [0, 0, 0]).ece(), "there are no tokens"),
    (lambda: m.top_entropy([]), "entropy is empty"),
    (lambda: m.top_entropy(P), "entropy must have shape [N], got shape (3, 2)"),
    (lambda: m.top_entropy([0.5], 0.0), "fraction must be above 0 and at most 1, got 0.0"),
    # bootstrap
    (
        lambda: m.bootstrap_interval(m.nll, P, Y, level=95),
        "level must be between 0 and 1, both excluded, got 95",
    ),
    (
        lambda: m.bootstrap_interval(m.nll, P, Y, resamples=0),
        "resamples must be an integer of at least 1, got 0",
    ),
    (
        lambda: m.paired_bootstrap(m.nll, P, P, Y, level=0),
        "level must be between 0 and 1, both excluded, got 0",
    ),
    (lambda: m.paired_bootstrap(m.nll, P, P, Y, resamples=1.5), "resamples must be an integer of at least 1"),
    (
        lambda: m.paired_bootstrap(m.nll, P, [[1, 0, 0]] * 3, Y),
        "probs_a and probs_b must have the same shape, got (3, 2) and (3, 3)",
    ),
    (lambda: m.paired_bootstrap(m.nll, [[0.5, 0.4]] * 3, P, Y), "rows of probs_a must sum to 1"),
    (lambda: m.paired_bootstrap(m.nll, P, [[0.5, 0.4]] * 3, Y), "rows of probs_b must sum to 1"),
    (lambda: m.paired_bootstrap(m.nll, P, P, [1, 1, 1]), "not a number on some resample"),
]


@pytest.mark.parametrize(("call", "message"), OTHER, ids=[message for _, message in OTHER])
def test_other_errors(call: Call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_rows_within_the_tolerance_pass() -> None:
    assert m.accuracy([[0.5, 0.50009], [0.50009, 0.49982]], [1, 0]) == 1.0


def test_confidence_within_the_tolerance_passes() -> None:
    assert m.ece_from_confidence([1.00005], [True]) == pytest.approx(5e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_labels_of_any_integer_dtype(dtype: type) -> None:
    assert m.accuracy(P, np.array(Y, dtype=dtype)) == 1.0


def test_wider_than_float64_is_taken() -> None:
    assert m.ece(np.array(P, dtype=np.longdouble), Y) == m.ece(P, Y)
