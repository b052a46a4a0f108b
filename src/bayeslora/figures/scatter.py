"""Accuracy against calibration error, a panel for each task and a point for each method: up and left is better."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bayeslora.atomic_files import replacing
from bayeslora.errors import InputError
from bayeslora.figures.marks import colour_and_marker
from bayeslora.figures.reliability import DPI
from bayeslora.figures.table import Row

_COLUMNS = 3
_SIDE, _LEGEND_LINE = 2.9, 0.22  # inches


def scatter_figure(sections: Mapping[str, Mapping[str, Row]], path: str | os.PathLike[str]) -> Path:
    """Write the figure; rows need the metrics ``acc`` and ``ece``, and bars are standard deviations over seeds."""
    target = Path(path)
    figure = draw_scatter(sections)
    with replacing(target) as partial:
        figure.savefig(partial, format=target.suffix.removeprefix(".") or "png")
    return target


def draw_scatter(sections: Mapping[str, Mapping[str, Row]]) -> Figure:
    """The figure that :func:`scatter_figure` writes."""
    if not sections:
        raise InputError("there is nothing to draw; no run has a result")
    methods = list(dict.fromkeys(method for rows in sections.values() for method in rows))
    columns = min(_COLUMNS, len(sections))
    lines, panels = math.ceil(len(sections) / columns), list(sections)
    legend_columns = max(1, 2 * columns)
    legend = _LEGEND_LINE * (math.ceil(len(methods) / legend_columns) + 1)
    figure = Figure(figsize=(_SIDE * columns, _SIDE * lines + legend), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    for place, ax in enumerate(axes.flat):
        if place < len(panels):
            _draw(ax, panels[place], sections[panels[place]], methods)
        else:
            ax.set_visible(False)
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=method)
        for method, (colour, marker) in zip(methods, map(colour_and_marker, range(len(methods))), strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns, fontsize=7.5, frameon=False)
    return figure


def _draw(ax: Axes, title: str, rows: Mapping[str, Row], methods: list[str]) -> None:
    for method, row in rows.items():
        colour, marker = colour_and_marker(methods.index(method))
        ece, acc = row["ece"], row["acc"]
        ax.errorbar(
            100 * ece.mean,
            100 * acc.mean,
            xerr=None if len(ece.values) < 2 else 100 * ece.sd,
            yerr=None if len(acc.values) < 2 else 100 * acc.sd,
            color=colour,
            marker=marker,
            markersize=5.5,
            elinewidth=0.8,
        )
    ax.set_title(title, fontsize=9.5, parse_math=False)
    ax.set_xlabel("ECE in % (less is better)", fontsize=8)
    ax.set_ylabel("accuracy in %", fontsize=8)
    ax.tick_params(labelsize=7.5)
    ax.grid(alpha=0.25)
