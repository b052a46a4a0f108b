"""Fronts of a search in three objectives: each pair of them, and how the hypervolume grew.

Feasible trials are filled, infeasible ones crosses, Pareto-optimal ones dark, and the chosen one a star.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from bayeslora.atomic_files import replacing
from bayeslora.errors import InputError
from bayeslora.figures.reliability import DPI

# From the palette of Okabe and Ito.
_STYLES = {
    "breaks a constraint": {"marker": "x", "color": "#7F7F7F", "markersize": 5.0},
    "beaten by another": {"marker": "o", "color": "#56B4E9", "markersize": 5.0},
    "on the front": {"marker": "o", "color": "#0072B2", "markersize": 6.5},
    "chosen": {"marker": "*", "color": "#D55E00", "markersize": 13.0},
    "LoRA": {"marker": "D", "color": "#000000", "markersize": 5.0},
}
_LABELS = {"ece": "ECE in %", "nll": "NLL", "acc": "accuracy in %"}
_FACTORS = {"ece": 100.0, "nll": 1.0, "acc": 100.0}
_PAIRS = (("ece", "nll"), ("ece", "acc"), ("nll", "acc"))
_SIDE = 3.1  # inches


@dataclass(frozen=True)
class FrontPoint:
    """A trial to draw: its ``acc``, ``nll`` and ``ece``, and its status."""

    metrics: Mapping[str, float]
    feasible: bool
    on_front: bool
    chosen: bool

    @property
    def kind(self) -> str:
        """Its entry in the legend."""
        if self.chosen:
            return "chosen"
        if self.on_front:
            return "on the front"
        return "beaten by another" if self.feasible else "breaks a constraint"


def pareto_figure(
    points: Sequence[FrontPoint],
    volumes: Sequence[float],
    path: str | os.PathLike[str],
    *,
    baseline: Mapping[str, float],
    bounds: Mapping[str, Sequence[float]],
    title: str,
) -> Path:
    """Write the figure.

    Args:
        points: the trials that did not fail.
        volumes: the hypervolume after each trial; without any, there is no panel of them.
        path: file to write; its suffix sets the format.
        baseline: LoRA's metrics, if there are any.
        bounds: bounds of constraints on the metrics; other constraints are not drawn.
        title: above all panels.
    """
    target = Path(path)
    figure = draw_pareto(points, volumes, baseline=baseline, bounds=bounds, title=title)
    with replacing(target) as partial:
        figure.savefig(partial, format=target.suffix.removeprefix(".") or "png")
    return target


def draw_pareto(
    points: Sequence[FrontPoint],
    volumes: Sequence[float],
    *,
    baseline: Mapping[str, float],
    bounds: Mapping[str, Sequence[float]],
    title: str = "",
) -> Figure:
    """The figure that :func:`pareto_figure` writes."""
    if not points:
        raise InputError("there is nothing to draw; no trial has a result")
    figure = Figure(figsize=(2 * _SIDE, 2 * _SIDE + 0.5), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for ax, pair in zip(axes.flat, _PAIRS, strict=False):
        _draw_pair(ax, *pair, points, baseline, bounds)
    _draw_volumes(axes[1, 1], volumes)
    shown = [kind for kind in _STYLES if (kind == "LoRA" and baseline) or any(point.kind == kind for point in points)]
    handles = [Line2D([], [], linestyle="", label=kind, **_STYLES[kind]) for kind in shown]  # type: ignore[arg-type]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7.5, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def _draw_pair(
    ax: Axes,
    first: str,
    second: str,
    points: Sequence[FrontPoint],
    baseline: Mapping[str, float],
    bounds: Mapping[str, Sequence[float]],
) -> None:
    drawn = [(point.kind, point.metrics) for point in points] + ([("LoRA", baseline)] if baseline else [])
    for kind in _STYLES:
        x, y = ([_FACTORS[name] * it[name] for what, it in drawn if what == kind] for name in (first, second))
        ax.plot(x, y, linestyle="", label=kind, **_STYLES[kind])  # type: ignore[arg-type]
    for name, line in ((first, ax.axvline), (second, ax.axhline)):
        for bound in bounds.get(name, ()):
            line(_FACTORS[name] * bound, color="#D55E00", linestyle="--", linewidth=1)
    _label(ax, _LABELS[first], _LABELS[second])


def _draw_volumes(ax: Axes, volumes: Sequence[float]) -> None:
    if not volumes:
        ax.set_visible(False)
        return
    shares = np.asarray(volumes) / max([*volumes, 1e-300])
    ax.step(np.arange(1, len(shares) + 1), 100 * shares, where="post", color="#0072B2")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(ax, "trials", "hypervolume in % of the last")


def _label(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=8)
    ax.set_ylabel(y, fontsize=8)
    ax.tick_params(labelsize=7.5)
    ax.grid(alpha=0.25)
