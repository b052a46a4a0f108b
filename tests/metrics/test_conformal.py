from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeslora.metrics import (
    conformal_sets,
    conformal_threshold,
    mean_set_size,
    set_coverage,
)

from .cases import Case, classifications, draw_labels, quick, softmax


def simulate(rng: np.random.Generator, rows: int) -> Case:
    """A badly overconfident model: three times the logits that the labels come from."""
    logits = rng.normal(size=(rows, 4))
    return softmax(3 * logits), draw_labels(rng, softmax(logits))


@pytest.mark.parametrize(("rows", "level"), [(20, 0.9), (50, 0.9), (50, 0.7), (199, 0.95), (9, 0.9)])
def test_coverage_is_as_promised_on_exchangeable_rows(rows: int, level: float) -> None:
    """Mean coverage is exactly ⌈(n+1) level⌉/(n+1) for continuous scores, whatever the model."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        threshold = conformal_threshold(*simulate(rng, rows), level)
        probs, labels = simulate(rng, 200)
        covered.append(set_coverage(conformal_sets(probs, threshold), labels))
    error = np.std(covered) / math.sqrt(len(covered))
    assert error < 0.006
    assert np.mean(covered) >= level - 4 * error
    assert np.mean(covered) == pytest.approx(math.ceil((rows + 1) * level) / (rows + 1), abs=4 * error)


def test_threshold_is_the_finite_sample_quantile() -> None:
    p = np.linspace(0.05, 0.95, 19)
    probs = np.stack([p, 1 - p], axis=1)
    labels = np.zeros(19, dtype=int)
    scores = np.sort(1 - p)
    for level, rank in ((0.9, 18), (0.95, 19), (0.5, 10), (0.51, 11)):
        assert conformal_threshold(probs, labels, level) == pytest.approx(scores[rank - 1])


@pytest.mark.parametrize(("rows", "finite"), [(8, False), (9, True)])
def test_too_few_rows_make_the_threshold_infinite(rows: int, finite: bool) -> None:
    threshold = conformal_threshold([[0.5, 0.5]] * rows, [0] * rows, 0.9)
    assert math.isfinite(threshold) == finite


def test_infinite_threshold_gives_every_option_that_is_present() -> None:
    probs = np.array([[0.7, 0.3, 0.0], [1.0, 0.0, 0.0]])
    present = np.array([[True, True, False], [True, True, True]])
    assert conformal_sets(probs, math.inf).all()
    assert conformal_sets(probs, math.inf, present).tolist() == present.tolist()


def test_impossible_option_is_in_only_if_the_threshold_has_seen_one() -> None:
    assert conformal_threshold([[1.0, 0.0]] * 2, [1, 1], 0.5) == 1.0
    assert conformal_sets([[1.0, 0.0]], 1.0).tolist() == [[True, True]]
    assert conformal_sets([[1.0, 0.0]], 0.999).tolist() == [[True, False]]


@quick
@given(classifications(), st.sampled_from([0.3, 0.5, 0.8]))
def test_calibration_rows_themselves_are_covered(case: Case, level: float) -> None:
    """At least ⌈(n+1) level⌉ of them: no score is lost to round-off between threshold and sets."""
    threshold = conformal_threshold(*case, level)
    n = len(case[1])
    covered = set_coverage(conformal_sets(case[0], threshold), case[1]) * n
    assert round(covered) >= min(n, math.ceil((n + 1) * level - 1e-9))


def test_float32_calibration_serves_float64_rows() -> None:
    for p in np.random.default_rng(0).random(50):
        probs = np.array([[p, 1 - p]], dtype=np.float32)
        threshold = conformal_threshold(probs, [0], 0.5)
        assert conformal_sets(probs, threshold)[0, 0]
        assert conformal_sets(probs.astype(np.float64), threshold)[0, 0]


def test_set_size_and_coverage_by_hand() -> None:
    sets = np.array([[True, False, True], [False, False, False], [True, True, True]])
    assert mean_set_size(sets) == pytest.approx(5 / 3)
    assert set_coverage(sets, [2, 0, 1]) == pytest.approx(2 / 3)
