"""What holds for every metric."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bayeslora.metrics as metrics
from bayeslora.metrics import accuracy, adaptive_ece, brier, classwise_ece, ece, nll

from .cases import Case, classifications, outcomes, quick

ALL: list[Callable[..., float]] = [
    accuracy,
    nll,
    brier,
    ece,
    adaptive_ece,
    classwise_ece,
    metrics.conformal_threshold,
    lambda p, y: metrics.reliability_bins(p, y).mce,
    lambda p, y: metrics.token_scores(p, y).ece(),
]

SELECTIVE: list[Callable[..., float]] = [
    metrics.ece_from_confidence,
    metrics.aurc,
    lambda c, r: metrics.accuracy_at_coverage(c, r, 0.4),
    lambda c, r: metrics.threshold_for_risk(c, r, 0.3),
    lambda c, r: metrics.threshold_for_coverage(c, 0.4),
]


def shuffled(case: Case, random: Any) -> Case:
    order = list(range(len(case[1])))
    random.shuffle(order)
    return case[0][order], case[1][order]


@quick
@given(classifications(), st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(case: Case, random: Any) -> None:
    other = shuffled(case, random)
    for metric in ALL:
        assert metric(*other) == pytest.approx(metric(*case), abs=1e-12)


@quick
@given(outcomes(), st.randoms(use_true_random=False))
def test_order_of_pairs_does_not_matter(case: Case, random: Any) -> None:
    other = shuffled(case, random)
    for metric in SELECTIVE:
        assert metric(*other) == pytest.approx(metric(*case), abs=1e-12)


@quick
@given(classifications(max_classes=4))
def test_extra_absent_option_changes_nothing_but_the_number_of_classes(case: Case) -> None:
    probs, labels = case
    wider = np.pad(probs, ((0, 0), (0, 1)))
    for metric in (accuracy, nll, brier, ece, adaptive_ece):
        assert metric(wider, labels) == metric(probs, labels)
    present = np.pad(np.ones(probs.shape, dtype=bool), ((0, 0), (0, 1)))
    assert classwise_ece(wider, labels, present=present) == classwise_ece(probs, labels)
    np.testing.assert_array_equal(metrics.entropy(wider), metrics.entropy(probs))


@quick
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.sampled_from([np.float32, np.float64]))
def test_perfect_predictions(labels: list[int], dtype: type) -> None:
    probs = np.eye(5, dtype=dtype)[labels]
    assert accuracy(probs, labels) == 1.0
    for metric in (nll, brier, ece, adaptive_ece, classwise_ece):
        assert metric(probs, labels) == 0.0


@quick
@given(classifications())
def test_numbers_stay_in_their_range(case: Case) -> None:
    for metric, high in ((accuracy, 1), (brier, 2), (ece, 1), (adaptive_ece, 1), (classwise_ece, 1)):
        assert 0 <= metric(*case) <= high + 1e-6
    assert nll(*case) >= 0
    assert ece(*case) <= metrics.reliability_bins(*case).mce + 1e-12


def test_results_are_plain_floats() -> None:
    case = [[0.5, 0.5], [0.2, 0.8], [0.4, 0.6]], [0, 1, 0]
    assert {type(metric(*case)) for metric in ALL} == {float}
    assert {type(metric([0.5, 0.2], [True, False])) for metric in SELECTIVE} == {float}


def test_example_of_the_package() -> None:
    assert doctest.testmod(metrics).attempted > 0
    assert doctest.testmod(metrics).failed == 0


def test_public_names_exist() -> None:
    assert [name for name in metrics.__all__ if not hasattr(metrics, name)] == []


def test_needs_neither_torch_nor_hugging_face() -> None:
    heavy = "{'torch', 'transformers', 'scipy'}"
    code = f"import sys, bayeslora.metrics; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
