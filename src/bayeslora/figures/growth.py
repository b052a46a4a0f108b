"""How figures grow with a number: curves on logarithmic axes, with dashed lines of linear growth."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bayeslora.atomic_files import replacing
from bayeslora.figures.panel import BLUE, GREEN, GREY, LABEL, PAGE, TICK, VERMILION
from bayeslora.figures.reliability import DPI

Points = Sequence[tuple[int, float]]

_COLOURS = (BLUE, VERMILION, GREEN, "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "osD^vP"


def growth_figure(axis: str, panels: Mapping[str, Mapping[str, Points]], path: str | os.PathLike[str]) -> Path:
    """Write the figure.

    Args:
        axis: what grows.
        panels: titles, and the curves of each by name; empty panels are left out.
        path: file to write; its suffix sets the format.
    """
    target = Path(path)
    shown = {title: curves for title, curves in panels.items() if curves}
    figure = Figure(figsize=(PAGE, 2.9), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(name for curves in shown.values() for name in curves))
    for place, (title, curves) in enumerate(shown.items(), 1):
        panel = figure.add_subplot(1, max(1, len(shown)), place, xscale="log", yscale="log")
        for name, points in curves.items():
            k = names.index(name)
            x, y = zip(*points, strict=True)
            panel.plot(x, y, color=_COLOURS[k % 6], marker=_MARKERS[k % 6], markersize=4, linewidth=1.3, label=name)
            panel.plot(x, [y[0] * value / x[0] for value in x], color=GREY, linestyle=":", linewidth=0.8)
        values = sorted({value for points in curves.values() for value, _ in points})
        panel.set_xticks(values, map(str, values))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlabel(axis, fontsize=LABEL)
        panel.set_title(title, fontsize=LABEL)
        panel.tick_params(labelsize=TICK, which="both")
        panel.grid(alpha=0.25, which="both")
        panel.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle for panel in figure.axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=TICK, frameon=False)
    with replacing(target) as partial:
        figure.savefig(partial, format=target.suffix.removeprefix(".") or "png")
    return target
