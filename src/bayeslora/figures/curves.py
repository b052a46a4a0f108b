"""The main metrics as a setting varies: a panel for each metric, a row of panels for each test split.

Large marks are means over seeds, small ones single seeds. Values are equally spaced, whatever their size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bayeslora.atomic_files import replacing
from bayeslora.errors import InputError
from bayeslora.figures.marks import Line, colour_and_marker, line_style
from bayeslora.figures.reliability import DPI
from bayeslora.figures.table import COLUMNS, Cell, Column, Row

Curves = Mapping[str, Mapping[str, Row]]
"""Rows by the name of a curve and by value; values may be missing."""

_WIDTH, _HEIGHT, _LEGEND = 2.25, 2.1, 0.3  # inches: three panels are as wide as a page
_SEED = 3  # size of the mark of one seed, in points
_LONG = 28  # total characters of tick labels, with spaces; longer ones are rotated


def curves_figure(
    sections: Mapping[str, Curves], path: str | os.PathLike[str], *, axis: str, ticks: Sequence[str], joined: bool
) -> Path:
    """Write the figure; rows need the main metrics.

    Args:
        sections: curves by the title of their row of panels.
        path: file to write; an older one is replaced atomically.
        axis: name of what varies.
        ticks: all values, in order.
        joined: draw lines between the values of a curve.
    """
    target = Path(path)
    figure = draw_curves(sections, axis=axis, ticks=ticks, joined=joined)
    with replacing(target) as partial:
        figure.savefig(partial, format=target.suffix.removeprefix(".") or "png")
    return target


def draw_curves(sections: Mapping[str, Curves], *, axis: str, ticks: Sequence[str], joined: bool) -> Figure:
    """The figure that :func:`curves_figure` writes."""
    if not sections:
        raise InputError("there is nothing to draw; no run has a result")
    names = list(dict.fromkeys(name for curves in sections.values() for name in curves))
    handles = [_mark(number, name, joined=joined) for number, name in enumerate(names)] if len(names) > 1 else []
    if any(len(cell.values) > 1 for cell in _cells(sections)):
        handles.append(Line2D([], [], linestyle="", marker="o", color="grey", markersize=_SEED, label="single seeds"))
    legend = _LEGEND if handles else 0.0
    figure = Figure(figsize=(_WIDTH * len(COLUMNS), _HEIGHT * len(sections) + legend), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sections), len(COLUMNS), squeeze=False)
    for line, (title, curves) in zip(panels, sections.items(), strict=True):
        for panel, column in zip(line, COLUMNS, strict=True):
            for number, name in enumerate(names):
                _draw(panel, curves.get(name, {}), column, ticks, number, joined=joined)
            _label(panel, column, axis, ticks)
        line[len(COLUMNS) // 2].set_title(title, fontsize=9.5, parse_math=False)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _cells(sections: Mapping[str, Curves]) -> Iterator[Cell]:
    for curves in sections.values():
        for rows in curves.values():
            for row in rows.values():
                yield from row.values()


def _draw(
    panel: Axes, rows: Mapping[str, Row], column: Column, ticks: Sequence[str], number: int, *, joined: bool
) -> None:
    """Draw one curve: single seeds small and light, and their means."""
    colour, marker = colour_and_marker(number)
    cells = {ticks.index(value): row[column.metric] for value, row in rows.items()}
    for place, cell in cells.items():
        if len(cell.values) > 1:
            seeds = [column.factor * value for value in cell.values]
            panel.plot(
                [place] * len(seeds), seeds, marker=marker, linestyle="", color=colour, markersize=_SEED, alpha=0.4
            )
    panel.plot(
        list(cells),
        [column.factor * cell.mean for cell in cells.values()],
        color=colour,
        marker=marker,
        markersize=6,
        linewidth=1.3,
        linestyle=_line(number, joined=joined),
    )


def _label(panel: Axes, column: Column, axis: str, ticks: Sequence[str]) -> None:
    aslant = len(" ".join(ticks)) > _LONG
    panel.set_xticks(range(len(ticks)), ticks, rotation=30 if aslant else 0, ha="right" if aslant else "center")
    panel.set_xlim(-0.5, len(ticks) - 0.5)
    panel.set_xlabel(axis, fontsize=8, parse_math=False)
    panel.set_ylabel(column.title + (" in %" if column.factor == 100 else ""), fontsize=8)
    panel.tick_params(labelsize=7.5)
    panel.grid(alpha=0.25)


def _mark(number: int, name: str, *, joined: bool) -> Line2D:
    """Legend entry of a curve."""
    colour, marker = colour_and_marker(number)
    return Line2D([], [], color=colour, marker=marker, linestyle=_line(number, joined=joined), label=name)


def _line(number: int, *, joined: bool) -> Line | Literal[""]:
    return line_style(number) if joined else ""
