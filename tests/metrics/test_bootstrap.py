from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import kstest

from bayeslora.metrics import (
    accuracy,
    bootstrap_interval,
    bootstrap_interval_over_runs,
    brier,
    ece,
    nll,
    paired_bootstrap,
    paired_bootstrap_over_runs,
)

from .cases import random_case


def always_first(rows: int) -> NDArray[Any]:
    return np.tile([0.9, 0.1], (rows, 1))


def share_right(probs: NDArray[Any], labels: NDArray[Any]) -> float:
    """Accuracy without the checks, for speed."""
    return float((probs.argmax(-1) == labels).mean())


def mean_label_probability(probs: NDArray[Any], labels: NDArray[Any]) -> float:
    return float(probs[np.arange(len(labels)), labels].mean())


def test_interval_is_made_of_the_resamples_of_the_seed() -> None:
    probs, labels = random_case(0, rows=60)
    rng = np.random.default_rng(7)
    values = sorted(ece(probs[k], labels[k]) for k in (rng.integers(60, size=60) for _ in range(200)))
    result = bootstrap_interval(ece, probs, labels, level=0.9, resamples=200, seed=7)
    assert result.value == ece(probs, labels)
    assert (result.low, result.high) == pytest.approx((values[9], values[189]), rel=1e-12)


@pytest.mark.system
def test_interval_contains_the_truth_as_often_as_it_says() -> None:
    """Bernoulli accuracy of 0.7 on 200 rows: the percentile interval at 95 % covers about 94 %."""
    rng, hits, runs = np.random.default_rng(0), 0, 300
    for seed in range(runs):
        labels = (rng.random(200) > 0.7).astype(int)
        result = bootstrap_interval(share_right, always_first(200), labels, resamples=200, seed=seed)
        hits += result.low <= 0.7 <= result.high
    assert 0.91 <= hits / runs <= 0.98


def test_width_follows_the_standard_error_and_the_level() -> None:
    labels = (np.arange(400) % 10 >= 7).astype(int)
    error = math.sqrt(0.7 * 0.3 / 400)
    for level, z in ((0.95, 1.96), (0.5, 0.674)):
        result = bootstrap_interval(share_right, always_first(400), labels, level=level, resamples=4000)
        assert result.value == pytest.approx(0.7)
        assert (result.high - result.low) / 2 == pytest.approx(z * error, rel=0.12)


def test_global_random_state_is_neither_used_nor_touched() -> None:
    probs, labels = random_case(0, rows=30)
    results = []
    for state in (1, 2):
        np.random.seed(state)
        before = np.random.get_state()[1].tolist()
        results.append(
            (
                bootstrap_interval(nll, probs, labels, resamples=20),
                paired_bootstrap(nll, probs, probs[:, ::-1], labels, resamples=20),
            )
        )
        assert np.random.get_state()[1].tolist() == before
    assert results[0] == results[1]
    assert bootstrap_interval(nll, probs, labels, resamples=20, seed=1) != results[0][0]


@pytest.mark.filterwarnings("error")
def test_infinite_metric_stays_an_answer() -> None:
    probs, labels = np.array([[1.0, 0.0]] * 9 + [[0.0, 1.0]]), [0] * 10
    result = bootstrap_interval(nll, probs, labels)
    assert (result.value, result.low, result.high) == (math.inf, 0.0, math.inf)


def test_paired_difference_is_made_of_the_resamples_of_the_seed() -> None:
    a, labels = random_case(0, rows=40)
    b = random_case(1, rows=40)[0]
    rng = np.random.default_rng(3)
    rows = [rng.integers(40, size=40) for _ in range(99)]
    values = sorted(nll(a[k], labels[k]) - nll(b[k], labels[k]) for k in rows)
    result = paired_bootstrap(nll, a, b, labels, level=0.8, resamples=99, seed=3)
    assert result.difference == nll(a, labels) - nll(b, labels)
    assert (result.low, result.high) == pytest.approx((values[9], values[89]), rel=1e-12)
    below, above = sum(v <= 0 for v in values), sum(v >= 0 for v in values)
    assert result.p_value == pytest.approx(min(1.0, 2 * (min(below, above) + 1) / 100))


@pytest.mark.parametrize("metric", [accuracy, nll, brier, ece])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("at_once", [1, 130, 10**6])
def test_all_resamples_at_once_are_what_they_are_one_by_one(metric, dtype, at_once, monkeypatch) -> None:
    monkeypatch.setattr("bayeslora.metrics.bootstrap._AT_ONCE", at_once)
    labels = random_case(0, rows=60)[1]
    a, b = ([random_case(seed, rows=60)[0].astype(dtype) for seed in seeds] for seeds in ((0, 1), (2, 3, 4)))

    def one_by_one(probs: NDArray[Any], labels: NDArray[Any]) -> float:
        return float(metric(probs, labels))

    quick, slow = (paired_bootstrap_over_runs(it, a, b, labels, resamples=50) for it in (metric, one_by_one))
    assert astuple(quick) == pytest.approx(astuple(slow), rel=1e-10, abs=1e-12)


def test_probabilities_of_zero_are_still_infinite_where_they_are_drawn() -> None:
    probs, labels = np.full((40, 2), 0.5), np.zeros(40, dtype=int)
    probs[3] = 0.0, 1.0
    interval = bootstrap_interval(nll, probs, labels, resamples=100)
    assert interval.value == interval.high == math.inf and interval.low == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="not a number"):
        paired_bootstrap(nll, probs, probs, labels, resamples=100)


@pytest.mark.system
def test_p_value_is_about_uniform_if_models_are_equally_good() -> None:
    """Both models guess at random; the metric is the mean probability of the label."""
    rng, p_values = np.random.default_rng(0), []
    for seed in range(200):
        a, b = (np.stack([p, 1 - p], axis=1) for p in rng.uniform(0.2, 0.8, size=(2, 150)))
        labels = rng.integers(2, size=150)
        result = paired_bootstrap(mean_label_probability, a, b, labels, resamples=200, seed=seed)
        p_values.append(result.p_value)
    assert kstest(p_values, "uniform").pvalue > 0.01
    assert np.mean(np.array(p_values) < 0.1) == pytest.approx(0.1, abs=0.06)


def test_p_value_is_small_for_a_real_difference_and_never_zero() -> None:
    labels = np.zeros(300, dtype=int)
    good, bad = always_first(300), always_first(300)
    bad[:60] = [0.1, 0.9]
    worse = paired_bootstrap(accuracy, bad, good, labels, resamples=400)
    assert worse.difference == pytest.approx(-0.2)
    assert worse.low < -0.2 < worse.high < 0
    assert worse.p_value == pytest.approx(2 / 401)
    better = paired_bootstrap(accuracy, good, bad, labels, resamples=400)
    assert (better.difference, better.p_value) == pytest.approx((0.2, 2 / 401))


def test_pairing_cancels_what_is_hard_for_both() -> None:
    """Two models that differ in a few rows: much narrower than the interval of either."""
    a, labels = random_case(0, rows=400)
    b = a.copy()
    b[:10] = b[:10, ::-1]
    alone = bootstrap_interval(nll, a, labels, resamples=300)
    paired = paired_bootstrap(nll, a, b, labels, resamples=300)
    assert paired.high - paired.low < 0.5 * (alone.high - alone.low)


def test_model_against_itself_is_no_difference() -> None:
    probs, labels = random_case(0, rows=50)
    result = paired_bootstrap(nll, probs, probs, labels, resamples=50)
    assert (result.difference, result.low, result.high, result.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_models_that_differ_by_rounding_tie_on_every_resample() -> None:
    """Ties count on both sides of zero; those that rounding breaks would all count on one."""
    probs, labels = random_case(0, rows=50)
    other = probs * (1 - 2**-52)
    assert not np.array_equal(probs, other)
    result = paired_bootstrap(nll, probs, other, labels, resamples=50)
    assert (result.low, result.high, result.p_value) == (0.0, 0.0, 1.0)


def same_everywhere(p: float) -> NDArray[np.float64]:
    """Twenty questions whose right answer, the first, has this probability."""
    return np.tile([p, 1 - p], (20, 1))


def test_runs_that_differ_are_drawn_with_replacement() -> None:
    """All questions are alike, so that only the runs make a difference: of two runs, half of the draws are one and the same."""
    labels = np.zeros(20, dtype=int)
    runs = [same_everywhere(0.2), same_everywhere(0.8)]
    drawn = bootstrap_interval_over_runs(mean_label_probability, runs, labels, level=0.9, resamples=400)
    assert (drawn.value, drawn.low, drawn.high) == pytest.approx((0.5, 0.2, 0.8))
    middle = bootstrap_interval_over_runs(mean_label_probability, runs, labels, level=0.4, resamples=400)
    assert (middle.low, middle.high) == pytest.approx((0.5, 0.5))


def test_the_same_seeds_are_drawn_for_both_methods() -> None:
    """What a seed does to both cancels; with another number of runs there is nothing to pair."""
    labels = np.zeros(20, dtype=int)
    a = [same_everywhere(p) for p in (0.2, 0.5, 0.8)]
    b = [same_everywhere(p) for p in (0.1, 0.4, 0.7)]
    paired = paired_bootstrap_over_runs(mean_label_probability, a, b, labels, resamples=200)
    assert (paired.low, paired.high) == pytest.approx((0.1, 0.1)) and paired.p_value < 0.02
    apart = paired_bootstrap_over_runs(mean_label_probability, a, b[:2], labels, resamples=200)
    assert apart.low < 0 < apart.high and apart.p_value > 0.05


def test_an_interval_over_runs_resamples_runs_and_the_questions_of_all_of_them_alike():
    rng = np.random.default_rng(3)
    runs, y = [rng.dirichlet(np.ones(3), size=40) for _ in range(3)], rng.integers(3, size=40)
    found = bootstrap_interval_over_runs(nll, runs, y, resamples=50, seed=7)
    draws = np.random.default_rng(7)
    rows = [draws.integers(40, size=40) for _ in range(50)]
    counts = np.random.default_rng([7, 3]).multinomial(3, [1 / 3] * 3, size=50)
    want = sorted(np.average([nll(p[r], y[r]) for p in runs], weights=c) for r, c in zip(rows, counts, strict=True))
    assert found.value == pytest.approx(np.mean([nll(p, y) for p in runs]))
    assert (found.low, found.high) == pytest.approx((want[1], want[48]))
    assert bootstrap_interval_over_runs(nll, runs[:1], y) == bootstrap_interval(nll, runs[0], y)
    assert bootstrap_interval_over_runs(nll, np.stack(runs), y, resamples=50, seed=7) == found
    with pytest.raises(ValueError, match="at least one run"):
        bootstrap_interval_over_runs(nll, [], y)
