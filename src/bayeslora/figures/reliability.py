"""Reliability diagrams: accuracy against confidence, and the distribution of confidence.

One panel per method, in rows of at most five. Above, a bar per confidence bin shows how often the answers in it are right,
and the hatched gap how far that is from the mean confidence in the bin: weighted by the number of answers, the gaps add up
to the ECE. Below, a histogram of the confidences.

Everything is placed in inches, so that panels are square and text keeps its size however many methods there are.
pyplot is not used: no global state, no window, no display.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike, NDArray

from bayeslora.atomic_files import replacing
from bayeslora.errors import InputError
from bayeslora.metrics import ReliabilityBins, accuracy, nll, reliability_bins
from bayeslora.metrics.validation import check_classification

DPI = 150
BINS = 15
FORMATS = ("png", "svg", "pdf")

FEW = 10
"""Bins with fewer answers than this are drawn lighter: with ten, the standard error of an accuracy of one half is 0.16."""

# From the palette of Okabe and Ito, which people of any colour vision can distinguish.
_BLUE, _VERMILION, _GREY = "#0072B2", "#D55E00", "#7F7F7F"
_TINT = "#F7DFCC"  # a fifth of vermilion: in an SVG, a transparent colour would make its hatches transparent, too
_LIGHT, _HATCH = 0.35, "////"
_PAPER = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}

_TICKS, _TICK_LABELS = (0, 0.25, 0.5, 0.75, 1), ("0", "0.25", "0.5", "0.75", "1")

# Lengths in inches.
_PAGE = 8.0  # width of two to four columns: 1200 pixels
_LARGEST, _SMALLEST = 3.51, 1.655  # side of one of two panels, and of one of four
_LEFT, _RIGHT, _BOTTOM, _TOP, _BETWEEN = 0.62, 0.16, 0.48, 0.1, 0.2
_HISTOGRAM, _STEP = 0.25, 0.13  # height of a histogram as a share of the side, and its distance from the diagram
_LEGEND_LINE, _NAME_LINE, _TITLE_LINE = 0.2, 0.19, 0.24

_COLUMNS = 5  # panels in a row, at most
_NARROW = 4.0  # inches; in a narrower figure the legend is smaller

_SMALLER, _SMALL, _MEDIUM, _LARGE = 7.0, 8.0, 9.5, 11.5  # sizes of text in points
_CHARACTER = 0.62 / 72  # inches of width per point of size, on the safe side

Predictions = Mapping[str, tuple[ArrayLike, ArrayLike]]
Box = tuple[float, float, float, float]
Colour = tuple[float, float, float, float]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Panel:
    """Contents of one panel: one entry per non-empty bin, and the metrics as text."""

    left: Floats
    width: Floats
    accuracy: Floats
    confidence: Floats
    share: Floats
    strength: Floats
    summary: str


class _Layout:
    """Positions of all parts, in inches from the lower left corner, and wrapped texts."""

    def __init__(self, names: Sequence[str], title: str, page: float | None) -> None:
        most = _COLUMNS if page is None else int((page - _LEFT - _RIGHT + _BETWEEN) / (_SMALLEST + _BETWEEN))
        self.rows = math.ceil(len(names) / most)
        self.columns = math.ceil(len(names) / self.rows)  # rows of nearly equal length
        free = (page or _PAGE) - _LEFT - _RIGHT - (self.columns - 1) * _BETWEEN
        self.side = min(_LARGEST, max(_SMALLEST, free / self.columns))
        self.width = _LEFT + self.columns * self.side + (self.columns - 1) * _BETWEEN + _RIGHT
        self.legend_columns = 2 if self.columns == 1 else 4
        self.legend_size = _SMALL if self.width > _NARROW else _SMALLER
        self.names = [_wrap(name, self.side, _MEDIUM) for name in names]
        self.title = _wrap(title, self.width, _LARGE)
        self.base = 4 // self.legend_columns * _LEGEND_LINE
        lines = max(_lines(name) for name in self.names)
        self.row = _BOTTOM + (_HISTOGRAM + 1) * self.side + _STEP + lines * _NAME_LINE
        self.height = self.base + self.rows * self.row + _lines(self.title) * _TITLE_LINE + _TOP

    def diagram(self, panel: int) -> Box:
        """Left, bottom, width and height of a diagram, as shares of the figure."""
        return self._box(panel, _BOTTOM + _HISTOGRAM * self.side + _STEP, self.side)

    def histogram(self, panel: int) -> Box:
        """Left, bottom, width and height of a histogram, as shares of the figure."""
        return self._box(panel, _BOTTOM, _HISTOGRAM * self.side)

    def leads(self, panel: int) -> bool:
        """Whether the panel is the first of its row."""
        return panel % self.columns == 0

    def _box(self, panel: int, above: float, height: float) -> Box:
        """Box that begins ``above`` inches over the lower end of the panel's row."""
        row, column = divmod(panel, self.columns)
        left = _LEFT + column * (self.side + _BETWEEN)
        bottom = self.base + (self.rows - 1 - row) * self.row + above
        return left / self.width, bottom / self.height, self.side / self.width, height / self.height


def reliability_figure(predictions: Predictions, path: str | os.PathLike[str], title: str = "") -> Path:
    """Write the reliability diagrams of some methods side by side; the suffix of the path sets the format.

    Args:
        predictions: probabilities ``[N, C]`` and labels ``[N]`` by the name of their method.
        path: a file ending in ``.png``, ``.svg`` or ``.pdf``; an older one is replaced atomically.
        title: text above all panels.
    """
    target = Path(path)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        allowed = ", ".join(f".{name}" for name in FORMATS)
        raise InputError(f"{target}: unknown suffix {target.suffix!r} of a figure; choose one of {allowed}")
    figure = draw_reliability(predictions, title)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial:
            figure.savefig(partial, format=kind, dpi=DPI)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}; choose another place") from error
    return target


def draw_reliability(predictions: Predictions, title: str = "", page: float | None = None) -> Figure:
    """The figure that :func:`reliability_figure` writes: a diagram and, below it, a histogram per method.

    ``page`` is the greatest width in inches.
    """
    if not predictions:
        raise InputError("no predictions to draw; give probabilities and labels of at least one method")
    return draw_panels({name: _panel(name, *prediction) for name, prediction in predictions.items()}, title, page)


def draw_panels(named: Mapping[str, Panel], title: str = "", page: float | None = None) -> Figure:
    """Draw the reliability diagrams of given panels."""
    panels = list(named.values())
    layout = _Layout(list(named), title, page)
    figure = Figure(figsize=(layout.width, layout.height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    top = max(math.ceil(10 * panel.share.max()) / 10 for panel in panels)  # the next tenth
    for k, panel in enumerate(panels):
        diagram = figure.add_axes(layout.diagram(k))
        histogram = figure.add_axes(layout.histogram(k), sharex=diagram)
        _draw_diagram(diagram, panel, layout.names[k], first=layout.leads(k))
        _draw_histogram(histogram, panel, top, first=layout.leads(k))
    figure.align_ylabels()
    _draw_legend(figure, layout.legend_columns, layout.legend_size)
    y = 1 - 0.7 * _TOP / layout.height
    figure.text(0.5, y, layout.title, ha="center", va="top", fontsize=_LARGE, weight="bold", parse_math=False)
    return figure


def make_panel(bins: ReliabilityBins, summary: str) -> Panel:
    """Make a panel from bins; the summary is shown in its corner."""
    shown = bins.count > 0
    return Panel(
        left=bins.edges[:-1][shown],
        width=np.diff(bins.edges)[shown],
        accuracy=bins.accuracy[shown],
        confidence=bins.confidence[shown],
        share=bins.count[shown] / bins.count.sum(),
        strength=np.where(bins.count >= FEW, 1.0, _LIGHT)[shown],
        summary=summary,
    )


def _panel(name: str, probabilities: ArrayLike, labels: ArrayLike) -> Panel:
    p, y = check_classification(probabilities, labels, f"probabilities of {name!r}")
    bins = reliability_bins(p, y, BINS)
    return make_panel(bins, f"ACC {accuracy(p, y):.3f}\nNLL {nll(p, y):.3f}\nECE {bins.ece:.3f}")


def _draw_diagram(axes: Axes, panel: Panel, name: str, first: bool) -> None:
    """Accuracy per bin, its gap to the mean confidence, and the diagonal on which both are equal."""
    _draw_bars(axes, panel, panel.accuracy, _shades(_BLUE, panel.strength), label="accuracy")
    _draw_gaps(axes, panel)
    axes.plot([0, 1], [0, 1], color="black", linestyle="--", linewidth=1)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.set_title(name, fontsize=_MEDIUM, pad=4, parse_math=False)
    axes.text(0.04, 0.96, panel.summary, va="top", fontsize=_SMALL, linespacing=1.3, bbox=_PAPER)
    axes.set_yticks(_TICKS, _TICK_LABELS if first else [])
    axes.tick_params(labelsize=_SMALL, labelbottom=False)
    if first:
        axes.set_ylabel("accuracy", fontsize=_MEDIUM)


def _draw_histogram(axes: Axes, panel: Panel, top: float, first: bool) -> None:
    """Share of the answers per bin, on one scale for all panels."""
    _draw_bars(axes, panel, panel.share, [to_rgba(_GREY)] * len(panel.share), label="answers")
    axes.set_ylim(0, top)
    axes.set_yticks([0, top])
    axes.set_xticks(_TICKS, _TICK_LABELS)
    axes.set_xlabel("confidence", fontsize=_MEDIUM)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.tick_params(labelsize=_SMALL, labelleft=first)
    if first:
        axes.set_ylabel("answers", fontsize=_SMALL)


def _draw_bars(axes: Axes, panel: Panel, height: Floats, colours: list[Colour], label: str) -> None:
    axes.bar(
        panel.left, height, panel.width, align="edge", color=colours, edgecolor="white", linewidth=0.8, label=label
    )


def _draw_gaps(axes: Axes, panel: Panel) -> None:
    """Draw gaps between accuracy and mean confidence: above the bar if overconfident, inside it if underconfident."""
    axes.bar(
        panel.left,
        panel.confidence - panel.accuracy,
        panel.width,
        bottom=panel.accuracy,
        align="edge",
        color=_shades(_TINT, panel.strength),
        edgecolor=_shades(_VERMILION, panel.strength),
        linewidth=0.8,
        hatch=_HATCH,
        label="gap",
    )


def _shades(colour: str, strength: Floats) -> list[Colour]:
    return [to_rgba(colour, float(s)) for s in strength]


def _draw_legend(figure: Figure, columns: int, size: float) -> None:
    keys = [
        Patch(facecolor=_BLUE, label="accuracy"),
        Patch(facecolor=_TINT, edgecolor=_VERMILION, hatch=_HATCH, label="gap to mean confidence"),
        Patch(facecolor=to_rgba(_BLUE, _LIGHT), label=f"fewer than {FEW} answers"),
        Line2D([], [], color="black", linestyle="--", linewidth=1, label="perfect calibration"),
    ]
    figure.legend(handles=keys, loc="lower center", ncols=columns, fontsize=size, frameon=False, borderaxespad=0.2)


def _wrap(text: str, width: float, size: float) -> str:
    """Wrap text to a width in inches."""
    return "\n".join(textwrap.wrap(text, int(width / (size * _CHARACTER))))


def _lines(text: str) -> int:
    return len(text.splitlines())
