"""Risk-coverage curves, read back from the figure."""

import numpy as np
import pytest

from bayeslora.figures.selective import draw_risk_coverage
from bayeslora.metrics import risk_coverage


def answers(seed, rows=100):
    rng = np.random.default_rng(seed)
    confidence = rng.permutation(rows) / rows  # all different
    return confidence, rng.random(rows) < confidence


def lines(answered):
    (axes,) = draw_risk_coverage(answered).axes
    return {line.get_label(): np.array(line.get_data()) / 100 for line in axes.lines}


def test_curves_are_those_of_the_metrics():
    answered = {"a": answers(0), "b": answers(1)}
    drawn = lines(answered)
    assert list(drawn) == ["a", "b"]  # what is best depends on the answers, so it is drawn of one alone
    for name, case in answered.items():
        curve = risk_coverage(*case)
        np.testing.assert_allclose(drawn[name], [curve.coverage, curve.risk])


@pytest.mark.parametrize("right", [0, 37, 100])
def test_at_best_all_right_answers_come_first(right):
    correct = np.arange(100) < right
    coverage, risk = lines({"this run": (np.linspace(0, 1, 100), correct)})["best possible"]
    given = np.round(100 * coverage).astype(int)
    np.testing.assert_allclose(risk, [(~correct)[:k].mean() for k in given])


def test_long_curves_are_thinned_from_their_first_to_their_last_point():
    case = answers(2, rows=5000)
    (coverage, risk), curve = lines({"a": case})["a"], risk_coverage(*case)
    assert 200 < len(coverage) <= 300 and (np.diff(coverage) > 0).all()
    assert coverage[0] == curve.coverage[0] and (coverage[-1], risk[-1]) == pytest.approx((1, curve.risk[-1]))
