"""Histograms of right and wrong answers, read back from the figure."""

import numpy as np
from matplotlib.colors import to_hex

from bayeslora.figures.certainty import draw_confidence, draw_epistemic
from bayeslora.figures.panel import BLUE, VERMILION
from bayeslora.metrics import reliability_bins_from_confidence


def bars(figure):
    """Left edges, and the number of right and of wrong answers."""
    (axes,) = figure.axes
    right, wrong = axes.containers
    assert (right[0].get_label(), wrong[0].get_label()) == ("right", "wrong")
    assert to_hex(right[0].get_facecolor()) == BLUE.lower() and to_hex(wrong[0].get_facecolor()) == VERMILION.lower()
    assert [bar.get_y() for bar in wrong] == [bar.get_height() for bar in right]  # one upon the other
    return [bar.get_x() for bar in right], *([bar.get_height() for bar in some] for some in (right, wrong))


def test_answers_are_counted_in_the_bins_of_the_reliability_diagram():
    rng = np.random.default_rng(0)
    confidence = rng.random(200)
    correct = rng.random(200) < confidence
    edges, right, wrong = bars(draw_confidence(confidence, correct))
    bins = reliability_bins_from_confidence(confidence, correct)
    np.testing.assert_allclose(edges, bins.edges[:-1], atol=1e-12)
    np.testing.assert_allclose(right, np.nan_to_num(bins.count * bins.accuracy))
    np.testing.assert_allclose(np.add(right, wrong), bins.count)


def test_uncertainty_is_drawn_up_to_the_largest():
    edges, right, wrong = bars(draw_epistemic([0.0, 0.1, 0.6, 1.2], [True, True, False, True]))
    np.testing.assert_allclose(edges, 0.1 * np.arange(12), atol=1e-12)
    assert (sum(right), sum(wrong)) == (3, 1) and right[-1] == 1 and wrong[6] == 1


def test_draws_that_agree_can_be_drawn():
    _, right, wrong = bars(draw_epistemic(np.zeros(3), [True, False, False]))
    assert (sum(right), sum(wrong)) == (1, 2)
