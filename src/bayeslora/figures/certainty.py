"""Histograms of confidence and uncertainty for right and wrong answers."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from bayeslora.figures.panel import BLUE, VERMILION, legend_below, new_panel
from bayeslora.figures.reliability import BINS

_HATCH = "////"
_STEPS = 12  # bars of uncertainty


def draw_confidence(confidence: ArrayLike, correct: ArrayLike, what: str = "answers") -> Figure:
    """Stacked histogram of right and wrong answers by confidence, in the bins of the reliability diagram."""
    return _draw(
        np.asarray(confidence), np.asarray(correct, dtype=bool), np.arange(BINS + 1) / BINS, "confidence", what
    )


def draw_epistemic(epistemic: ArrayLike, correct: ArrayLike) -> Figure:
    """Stacked histogram of right and wrong answers by epistemic uncertainty."""
    values = np.asarray(epistemic, dtype=np.float64)
    edges = np.linspace(0.0, max(float(values.max()), 1e-9), _STEPS + 1)
    return _draw(values, np.asarray(correct, dtype=bool), edges, "epistemic uncertainty in nats", "answers")


def _draw(values: np.ndarray, correct: np.ndarray, edges: np.ndarray, x: str, y: str) -> Figure:
    figure, axes = new_panel(x, y, height=2.5)
    axes.grid(axis="x", visible=False)
    axes.hist(
        [values[correct], values[~correct]],
        bins=edges.tolist(),
        stacked=True,
        color=[BLUE, VERMILION],
        edgecolor="white",
        linewidth=0.6,
        label=["right", "wrong"],
    )
    for bar in axes.containers[1]:
        bar.set_hatch(_HATCH)
    axes.set_xlim(edges[0], edges[-1])
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    legend_below(figure, axes)
    return figure
