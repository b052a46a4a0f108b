"""One small panel, as wide as a column of a paper: its text has the size it says when it is printed there."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bayeslora.figures.reliability import DPI

COLUMN, PAGE = 3.25, 6.75
"""Widths in inches of a column of a paper, and of both of them."""

LABEL, TICK = 8.0, 7.5
"""Sizes of text in points."""

BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
"""From the palette of Okabe and Ito."""


def new_panel(x: str, y: str, height: float = 2.3) -> tuple[Figure, Axes]:
    """A figure with axes that have these labels."""
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
    """A legend under the panel, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=TICK, frameon=False)
