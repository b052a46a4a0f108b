"""Training curves: the likelihood, the KL terms and the metrics on validation data at each evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from bayeslora.figures.marks import colour_and_marker, line_style
from bayeslora.figures.panel import legend_below, new_panel

_FAR = 30.0
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""


def draw_history(epochs: Sequence[int], curves: Mapping[str, Sequence[float]], y: str) -> Figure:
    """Draw a curve for each quantity over the epochs; ``y`` is the label of the axis."""
    figure, axes = new_panel("epoch", y, height=2.4)
    for number, (name, values) in enumerate(curves.items()):
        colour, marker = colour_and_marker(number)
        axes.plot(
            epochs,
            values,
            color=colour,
            marker=marker,
            linestyle=line_style(number),
            markersize=4,
            linewidth=1.3,
            label=name,
        )
    if _far_apart(curves):
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    legend_below(figure, axes)
    return figure


def _far_apart(curves: Mapping[str, Sequence[float]]) -> bool:
    values = [value for curve in curves.values() for value in curve]
    return min(values) > 0 and max(values) > _FAR * min(values)
