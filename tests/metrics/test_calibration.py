from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from netcal.metrics import ECE, MCE
from numpy.typing import NDArray

from bayeslora.metrics import (
    adaptive_ece,
    classwise_ece,
    ece,
    ece_from_confidence,
    reliability_bins,
    reliability_bins_from_confidence,
)

from .cases import Case, classifications, quick, random_case


def brute_force_ece(confidence: NDArray[Any], correct: NDArray[Any], bins: int) -> float:
    """Bins ((b-1)/B, b/B], 0 in the first, each edge rounded to the dtype of the confidences."""
    total = 0.0
    for b in range(1, bins + 1):
        low, high = (float(confidence.dtype.type(k / bins)) for k in (b - 1, b))
        rows = [k for k, c in enumerate(confidence) if low < c <= high or (b == 1 and c == 0)]
        if rows:
            gap = sum(bool(correct[k]) for k in rows) - sum(float(confidence[k]) for k in rows)
            total += abs(gap) / len(confidence)
    return total


def top(probs: NDArray[Any], labels: NDArray[Any]) -> Case:
    return probs.max(-1), probs.argmax(-1) == labels


# Equal width ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 15])
def test_bins_of_chunks_add_up_to_those_of_all_rows(bins: int) -> None:
    confidence, correct = top(*random_case(3, rows=200, classes=5))
    whole = reliability_bins_from_confidence(confidence, correct, bins)
    first, second = (
        reliability_bins_from_confidence(confidence[it], correct[it], bins) for it in ([7], slice(8, None))
    )
    rest = reliability_bins_from_confidence(confidence[:7], correct[:7], bins)
    added = first + second + rest
    assert np.array_equal(added.count, whole.count) and added.ece == pytest.approx(whole.ece, rel=1e-12)
    np.testing.assert_allclose(added.confidence, whole.confidence)
    np.testing.assert_allclose(added.accuracy, whole.accuracy)
    with pytest.raises(ValueError, match="use the same number for all"):
        whole + reliability_bins_from_confidence(confidence, correct, bins + 1)


@pytest.mark.parametrize("bins", [1, 10, 15, 40])
@pytest.mark.parametrize("seed", range(4))
def test_ece_and_mce_agree_with_netcal(seed: int, bins: int) -> None:
    probs, labels = random_case(seed, rows=500, classes=5)
    assert ece(probs, labels, bins) == pytest.approx(ECE(bins).measure(probs, labels), rel=1e-9)
    expected = MCE(bins).measure(probs, labels)
    assert reliability_bins(probs, labels, bins).mce == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("seed", range(4))
def test_pairs_agree_with_netcal_on_one_dimension(seed: int, bins: int) -> None:
    """Given one number per row, netcal takes it for the probability of the label 1: here, of being right."""
    confidence, correct = top(*random_case(seed, rows=300))
    expected = ECE(bins).measure(confidence, correct.astype(int))
    assert ece_from_confidence(confidence, correct, bins) == pytest.approx(expected, rel=1e-9)


def test_netcal_agrees_on_zero_and_one_and_empty_bins() -> None:
    confidence = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 0.55])
    correct = np.array([1, 0, 1, 1, 0, 1])
    expected = (1.0 + 1.0 + 0.45) / 6
    assert ECE(10).measure(confidence, correct) == pytest.approx(expected, rel=1e-9)
    assert ece_from_confidence(confidence, correct, 10) == pytest.approx(expected, rel=1e-12)


def test_netcal_puts_an_edge_into_the_bin_above() -> None:
    """0.5 is between a row below (gap -0.4) and a row above (gap +0.4); its own gap is -0.5."""
    confidence, correct = np.array([0.4, 0.5, 0.6]), np.array([0, 0, 1])
    with_the_bin_below = (abs(-0.4 - 0.5) + 0.4) / 3
    with_the_bin_above = (0.4 + abs(0.4 - 0.5)) / 3
    assert ece_from_confidence(confidence, correct, 2) == pytest.approx(with_the_bin_below)
    assert brute_force_ece(confidence, correct, 2) == pytest.approx(with_the_bin_below)
    assert ECE(2).measure(confidence, correct) == pytest.approx(with_the_bin_above)


@quick
@given(classifications(), st.sampled_from([1, 2, 3, 4, 5, 10, 12, 15]))
def test_ece_equals_brute_force_on_edges(case: Case, bins: int) -> None:
    assert ece(*case, bins) == pytest.approx(brute_force_ece(*top(*case), bins), abs=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("bins", [1, 3, 10, 15, 100])
def test_every_edge_belongs_to_the_bin_it_closes(bins: int, dtype: type) -> None:
    edges = (np.arange(bins + 1) / bins).astype(dtype)
    count = reliability_bins_from_confidence(edges, np.ones(bins + 1, dtype=bool), bins).count
    assert count.tolist() == [2] + [1] * (bins - 1)


def test_float32_edge_is_above_the_number_it_stands_for() -> None:
    """The trap behind comparing in the input's dtype: 0.2 as float32 is greater than 3/15."""
    confidence = np.array([0.2], dtype=np.float32)
    assert Fraction(float(confidence[0])) > Fraction(3, 15)
    assert np.flatnonzero(reliability_bins_from_confidence(confidence, [True], 15).count).tolist() == [2]
    assert np.searchsorted(np.arange(16) / 15, float(confidence[0])) - 1 == 3


def test_reliability_bins_hold_means_and_nan() -> None:
    probs = np.array([[0.6, 0.4], [0.3, 0.7], [0.9, 0.1]])
    result = reliability_bins(probs, [0, 0, 0], bins=4)
    assert result.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert result.count.tolist() == [0, 0, 2, 1]
    np.testing.assert_allclose(result.confidence, [math.nan, math.nan, 0.65, 0.9])
    np.testing.assert_allclose(result.accuracy, [math.nan, math.nan, 0.5, 1.0])
    np.testing.assert_allclose(result.gap, [math.nan, math.nan, -0.15, 0.1])
    assert result.ece == pytest.approx((2 * 0.15 + 0.1) / 3)
    assert result.mce == pytest.approx(0.15)


@pytest.mark.filterwarnings("error")
def test_empty_bins_do_not_warn() -> None:
    assert ece([[1.0, 0.0]], [0], bins=50) == 0.0


def test_confidence_a_rounding_error_above_one_is_in_the_last_bin() -> None:
    above = np.array([[np.nextafter(np.float32(1), np.float32(2)), 0]], dtype=np.float32)
    assert reliability_bins(above, [0], 15).count.tolist() == [0] * 14 + [1]


def test_calibrated_model_has_small_error_and_overconfident_one_has_not() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(100_000)
    calibrated, overconfident = (rng.random(100_000) < confidence / k for k in (1, 2))
    assert ece_from_confidence(confidence, calibrated) < 0.01
    assert ece_from_confidence(confidence, overconfident) == pytest.approx(0.25, abs=0.01)


# Equal mass -----------------------------------------------------------------------------------------------


def test_adaptive_bins_are_array_split_when_nothing_is_tied() -> None:
    probs, labels = random_case(3, rows=47)
    confidence, correct = top(probs, labels)
    parts = np.array_split(np.argsort(confidence), 6)
    expected = sum(abs(correct[part].sum() - confidence[part].sum()) for part in parts) / 47
    assert adaptive_ece(probs, labels, 6) == pytest.approx(expected, rel=1e-12)


def test_adaptive_bins_do_not_split_equal_confidences() -> None:
    """Two bins of two would cut 0.7 from 0.7: all three 0.7 go with the bin of the first, that of 0.6."""
    confidence = np.array([0.6, 0.7, 0.7, 0.7])
    probs = np.stack([confidence, 1 - confidence], axis=1)
    assert adaptive_ece(probs, [0, 1, 1, 0], bins=2) == pytest.approx(abs(2 - 2.7) / 4)


def test_adaptive_with_more_bins_than_rows_takes_each_row_by_itself() -> None:
    probs = [[0.6, 0.4], [0.8, 0.2]]
    assert adaptive_ece(probs, [0, 1], bins=15) == pytest.approx((0.4 + 0.8) / 2)


@quick
@given(classifications(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_adaptive_does_not_depend_on_order_of_ties(case: Case, bins: int, random: Any) -> None:
    order = list(range(len(case[1])))
    random.shuffle(order)
    shuffled = case[0][order], case[1][order]
    assert adaptive_ece(*shuffled, bins) == pytest.approx(adaptive_ece(*case, bins), abs=1e-12)


@quick
@given(classifications())
def test_one_bin_is_mean_confidence_against_accuracy(case: Case) -> None:
    confidence, correct = top(*case)
    expected = abs(correct.mean() - confidence.astype(float).mean())
    assert ece(*case, 1) == pytest.approx(expected, abs=1e-12)
    assert adaptive_ece(*case, 1) == pytest.approx(expected, abs=1e-12)


# Class by class -------------------------------------------------------------------------------------------


@quick
@given(classifications(), st.sampled_from([1, 4, 15]))
def test_classwise_is_the_mean_of_binary_errors(case: Case, bins: int) -> None:
    probs, labels = case
    each = [brute_force_ece(probs[:, c], labels == c, bins) for c in range(probs.shape[1])]
    assert classwise_ece(probs, labels, bins) == pytest.approx(np.mean(each), abs=1e-12)


def test_classwise_agrees_with_netcal_class_by_class() -> None:
    probs, labels = random_case(5, rows=400, classes=3)
    each = [ECE(15).measure(probs[:, c], (labels == c).astype(int)) for c in range(3)]
    assert classwise_ece(probs, labels) == pytest.approx(np.mean(each), rel=1e-9)


def test_absent_options_do_not_count_for_their_class() -> None:
    probs = np.array([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6], [0.7, 0.3, 0.0], [0.9, 0.1, 0.0]])
    labels = np.array([0, 1, 0, 1])
    present = probs > 0
    each = [brute_force_ece(probs[rows, c], labels[rows] == c, 15) for c, rows in enumerate(present.T)]
    assert each[2] == pytest.approx(0.6)
    assert classwise_ece(probs, labels, present=present) == pytest.approx(np.mean(each))
    assert classwise_ece(probs, labels) == pytest.approx(np.mean([*each[:2], 0.6 / 4]))


def test_class_that_no_row_offers_is_left_out() -> None:
    probs = np.array([[0.75, 0.25, 0.0]])
    assert classwise_ece(probs, [0], present=probs > 0) == pytest.approx(0.25)
    assert classwise_ece(probs, [0]) == pytest.approx(0.5 / 3)
