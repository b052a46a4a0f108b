"""A small panel as wide as a column of a paper, so that text is printed at its nominal size."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bayeslora.figures.reliability import DPI

COLUMN, PAGE = 3.25, 6.75
"""Widths in inches of one column of a paper, and of the page."""

LABEL, TICK = 8.0, 7.5
"""Sizes of text in points."""

BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
"""From the palette of Okabe and Ito."""


def new_panel(x: str, y: str, height: float = 2.3) -> tuple[Figure, Axes]:
    """Create a figure with labelled axes."""
    figure = Figure(figsize=(COLUMN, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x, fontsize=LABEL)
    axes.set_ylabel(y, fontsize=LABEL)
    axes.tick_params(labelsize=TICK)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_below(figure: Figure, axes: Axes) -> None:
    """Add a legend below the panel."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=TICK, frameon=False)
