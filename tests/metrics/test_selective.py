from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from bayeslora.metrics import (
    accuracy_at_coverage,
    aurc,
    auroc,
    confidence_auroc,
    risk_coverage,
    shift_auroc,
    threshold_for_coverage,
    threshold_for_risk,
)

from .cases import Case, outcomes, quick, random_case


def orders_of_ties(confidence: np.ndarray, correct: np.ndarray) -> list[list[bool]]:
    """``correct`` from most to least confident, in every order that ties allow."""
    groups = [correct[confidence == c].tolist() for c in np.unique(confidence)[::-1]]
    choices = itertools.product(*(itertools.permutations(group) for group in groups))
    return [[x for group in choice for x in group] for choice in choices]


# AUROC ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [1, 8])
@pytest.mark.parametrize("seed", range(4))
def test_auroc_agrees_with_scikit_learn(seed: int, digits: int) -> None:
    rng = np.random.default_rng(seed)
    positive = rng.random(300) < 0.3
    scores = np.round(rng.normal(size=300) + positive, digits)
    assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), rel=1e-12)


@quick
@given(outcomes())
def test_auroc_is_the_share_of_pairs_in_order(case: Case) -> None:
    scores, positive = case
    assume(positive.any() and not positive.all())
    pairs = itertools.product(scores[positive], scores[~positive])
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    assert auroc(scores, positive) == pytest.approx(np.mean(wins), rel=1e-12)


def test_auroc_takes_zeros_and_ones() -> None:
    assert auroc([0.1, 0.9, 0.5], [0, 1, 0]) == 1.0
    assert auroc([0.1, 0.9, 0.5], [1, 0, 0]) == 0.0


@pytest.mark.parametrize("digits", [1, 8])
def test_shift_auroc_agrees_with_scikit_learn(digits: int) -> None:
    """Groups of different sizes, with and without ties; the shifted questions are the positives."""
    rng = np.random.default_rng(0)
    own, shifted = np.round(rng.normal(size=70), digits), np.round(rng.normal(size=40) + 0.5, digits)
    expected = roc_auc_score([0] * 70 + [1] * 40, [*own, *shifted])
    assert shift_auroc(own, shifted) == pytest.approx(expected, rel=1e-12)
    assert shift_auroc(shifted, own) == pytest.approx(1 - expected, rel=1e-12)


def test_shift_auroc_of_no_use_and_of_nothing() -> None:
    assert shift_auroc([0.0, 0.0], [0.0, 0.0, 0.0]) == 0.5
    with pytest.raises(ValueError, match="shifted is empty"):
        shift_auroc([1.0], [])


@pytest.mark.parametrize("seed", range(3))
def test_confidence_auroc(seed: int) -> None:
    probs, labels = random_case(seed)
    correct = probs.argmax(-1) == labels
    expected = roc_auc_score(correct, probs.max(-1))
    assert confidence_auroc(probs, labels) == pytest.approx(expected, rel=1e-12)


# Risk and coverage ----------------------------------------------------------------------------------------


def test_one_point_per_distinct_confidence() -> None:
    curve = risk_coverage([0.9, 0.5, 0.9, 0.7], [True, False, False, True])
    assert curve.threshold.tolist() == [0.9, 0.7, 0.5]
    assert curve.coverage.tolist() == [0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 2])


@quick
@given(outcomes())
def test_points_are_what_their_threshold_selects(case: Case) -> None:
    confidence, correct = case
    curve = risk_coverage(confidence, correct)
    assert sorted(set(confidence), reverse=True) == curve.threshold.tolist()
    for t, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        accepted = confidence >= t
        assert coverage == pytest.approx(accepted.mean())
        assert risk == pytest.approx((~correct[accepted]).mean())


def test_aurc_by_hand() -> None:
    assert aurc([0.9, 0.8, 0.7], [True, False, True]) == pytest.approx((0 + 1 / 2 + 1 / 3) / 3)
    assert aurc([0.9, 0.8, 0.7], [False, True, True]) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@quick
@given(outcomes(max_rows=6, levels=2))
def test_aurc_is_the_mean_over_all_orders_of_ties(case: Case) -> None:
    each = []
    for order in orders_of_ties(*case):
        errors = np.cumsum(~np.array(order))
        each.append(np.mean(errors / np.arange(1, len(order) + 1)))
    assert aurc(*case) == pytest.approx(np.mean(each), abs=1e-12)


def test_aurc_is_the_mean_over_random_orders_of_ties() -> None:
    rng = np.random.default_rng(0)
    confidence, correct = rng.integers(0, 4, size=40) / 4, rng.random(40) < 0.6
    each = [aurc(confidence + 1e-6 * rng.random(40), correct) for _ in range(4000)]
    error = np.std(each) / math.sqrt(len(each))
    assert aurc(confidence, correct) == pytest.approx(np.mean(each), abs=4 * error)
    assert error < 1e-3


@quick
@given(outcomes(max_rows=6, levels=2), st.integers(1, 6))
def test_accuracy_at_coverage_is_the_mean_over_all_orders_of_ties(case: Case, k: int) -> None:
    n = len(case[0])
    k = min(k, n)
    each = [np.mean(order[:k]) for order in orders_of_ties(*case)]
    assert accuracy_at_coverage(*case, k / n) == pytest.approx(np.mean(each), abs=1e-12)


def test_coverage_is_rounded_up_but_not_for_round_off() -> None:
    confidence = np.arange(100)[::-1] / 100
    correct = np.arange(100) < 7
    assert 0.07 * 100 > 7
    assert accuracy_at_coverage(confidence, correct, 0.07) == 1.0
    assert accuracy_at_coverage(confidence, correct, 0.071) == pytest.approx(7 / 8)
    assert accuracy_at_coverage(confidence, correct, 1e-9) == 1.0
    assert accuracy_at_coverage(confidence, correct, 1.0) == pytest.approx(0.07)


# Thresholds -----------------------------------------------------------------------------------------------


def test_threshold_for_risk_takes_the_largest_coverage() -> None:
    """Risks by falling threshold: 1, 1/2, 1/3, 1/4, 2/5. The bound holds at 0.6 and breaks above."""
    confidence, correct = [0.9, 0.8, 0.7, 0.6, 0.5], [False, True, True, True, False]
    assert threshold_for_risk(confidence, correct, 0.3) == 0.6
    assert threshold_for_risk(confidence, correct, 0.25) == 0.6
    assert threshold_for_risk(confidence, correct, 0.4) == 0.5
    assert threshold_for_risk(confidence, correct, 0.2) == math.inf


@quick
@given(outcomes(), st.integers(0, 10))
def test_threshold_for_risk_is_the_best_of_all(case: Case, tenths: int) -> None:
    confidence, correct = case
    holds = [t for t in set(confidence) if (~correct[confidence >= t]).mean() <= tenths / 10]
    assert threshold_for_risk(confidence, correct, tenths / 10) == min(holds, default=math.inf)


@quick
@given(outcomes(), st.integers(1, 20))
def test_threshold_for_coverage_is_the_highest_that_covers(case: Case, twentieths: int) -> None:
    confidence, coverage = case[0], twentieths / 20
    t = threshold_for_coverage(confidence, coverage)
    assert (confidence >= t).mean() >= coverage - 1e-12
    assert (confidence > t).mean() < coverage


def test_threshold_of_float32_accepts_the_row_it_came_from() -> None:
    confidence = np.array([0.1, 0.7, 0.3], dtype=np.float32)
    assert (confidence >= threshold_for_coverage(confidence, 1 / 3)).tolist() == [False, True, False]
