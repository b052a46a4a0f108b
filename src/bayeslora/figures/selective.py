"""Risk against coverage: the error rate if only the most confident answers are given."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from bayeslora.figures.marks import colour_and_marker, line_style
from bayeslora.figures.panel import GREY, legend_below, new_panel
from bayeslora.metrics import RiskCoverage, risk_coverage

Answered = Mapping[str, tuple[ArrayLike, ArrayLike]]
"""Confidences ``[N]`` and which answers were right ``[N]``, by the name of a curve."""

_POINTS = 300  # of a curve, at most
_LEGEND_LINE = 0.17  # inches


def draw_risk_coverage(answered: Answered) -> Figure:
    """Draw a risk-coverage curve per entry; for a single entry also the optimal curve."""
    height = 2.3 + _LEGEND_LINE * math.ceil(len(answered) / 2)
    figure, axes = new_panel("coverage: answers given, in %", "risk: wrong among them, in %", height)
    for number, (name, (confidence, correct)) in enumerate(answered.items()):
        _draw(axes, number, name, risk_coverage(confidence, correct))
    if len(answered) == 1:
        _, correct = next(iter(answered.values()))
        _draw_best(axes, np.asarray(correct, dtype=bool))
    axes.set_xlim(0, 101)
    axes.set_ylim(bottom=0)
    legend_below(figure, axes)
    return figure


def _draw(axes: Axes, number: int, name: str, curve: RiskCoverage) -> None:
    colour, marker = colour_and_marker(number)
    kept = _thinned(curve.coverage)
    axes.plot(
        100 * curve.coverage[kept],
        100 * curve.risk[kept],
        color=colour,
        linestyle=line_style(number),
        linewidth=1.3,
        marker=marker,
        markersize=4,
        markevery=(0.02 * (number % 5), 0.2),  # offset from those of other curves
        label=name.replace("$", r"\$"),
    )


def _draw_best(axes: Axes, correct: NDArray[np.bool_]) -> None:
    """Draw the optimal curve: all right answers ranked before all wrong ones."""
    coverage = np.linspace(0.01, 1, 100)
    risk = np.maximum(0.0, 1 - correct.mean() / coverage)
    axes.plot(100 * coverage, 100 * risk, color=GREY, linestyle=":", linewidth=1.2, label="best possible")


def _thinned(coverage: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of points at about equal distances, including the first and the last."""
    wanted = np.linspace(coverage[0], coverage[-1], _POINTS)
    return np.unique(np.searchsorted(coverage, wanted).clip(0, len(coverage) - 1))
