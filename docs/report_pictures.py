"""Pictures of the reports in ``benchmarks/reports``, drawn from the records in ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from picture_style import BLUE, GREY, INK, VERMILION
from result_pictures import NARROW, read

FAMILIES = {
    "LoRA and variants": (GREY, {"lora": "o", "lora-plus": "s", "adalora": "^", "mc-dropout": "D"}),
    "fitted to a trained LoRA": (
        VERMILION,
        {"temperature": "o", "tfb": "s", "laplace": "^", "laplace-last-layer": "D"},
    ),
    "trained distributions": (BLUE, {"bayesian-lora": "o", "blob": "s", "bbb": "^", "c-lora": "D"}),
    "ensembles": (INK, {"deep-ensemble": "o", "checkpoint-ensemble": "s"}),
}
"""Colour of a family of methods, and the marker of each method."""

COMPARED = ("arc-easy", "arc-challenge", "openbookqa", "winogrande-s", "winogrande-m", "boolq")

SIZE = 8.0
"""Size of text in panels of half the width, in points."""


def label(axes: Axes, x: str = "", y: str = "", title: str = "") -> None:
    """Labels and a grid for a panel of half the width."""
    axes.set_xlabel(x, fontsize=SIZE)
    axes.set_ylabel(y, fontsize=SIZE)
    axes.set_title(title, fontsize=SIZE + 1)
    axes.tick_params(labelsize=SIZE - 0.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 5, 10]))
    axes.grid(color=GREY, alpha=0.25)
    axes.set_axisbelow(True)


def draw_family(axes: Axes, rows: Mapping[str, Any], methods: Mapping[str, str], colour: str) -> None:
    """Accuracy against calibration error: means over seeds, and bars of one standard deviation."""
    crosses: tuple[list[float], list[float]] = ([], [])  # one line with gaps: a picture of many lines is large
    for method, marker in methods.items():
        x, y = ([100 * run["metrics"][metric] for run in rows[method]["runs"]] for metric in ("ece", "acc"))
        at, up, wide, high = mean(x), mean(y), stdev(x), stdev(y)
        axes.plot(at, up, marker, color=colour, markersize=5, markeredgewidth=0, clip_on=False, zorder=2)
        crosses[0].extend((at - wide, at + wide, nan, at, at, nan))
        crosses[1].extend((up, up, nan, up - high, up + high, nan))
    axes.plot(*crosses, color=colour, linewidth=0.6, alpha=0.4, zorder=1)


def draw_comparison(records: Iterable[Path]) -> Figure:
    """Accuracy against calibration error of all methods, a panel for each task."""
    sections = {task: rows for record in records for task, rows in read(record)["sections"].items()}
    figure = Figure(figsize=(NARROW, 7.2))
    panels = figure.subplots(3, 2)
    figure.subplots_adjust(left=0.105, right=0.985, top=0.965, bottom=0.27, wspace=0.2, hspace=0.34)
    for axes, task in zip(panels.flat, COMPARED, strict=True):
        for colour, methods in FAMILIES.values():
            draw_family(axes, sections[task], methods, colour)
        label(axes, title=task)
    for axes in panels[:, 0]:
        axes.set_ylabel("accuracy in %", fontsize=SIZE)
    for axes in panels[-1]:
        axes.set_xlabel("ECE in %", fontsize=SIZE)
    for k, (family, (colour, methods)) in enumerate(FAMILIES.items()):
        handles = [Line2D([], [], linestyle="", marker=it, color=colour, markersize=5) for it in methods.values()]
        figure.legend(
            handles,
            methods,
            title=family,
            loc="upper left",
            bbox_to_anchor=((0.03, 0.53)[k % 2], (0.215, 0.105)[k // 2]),
            fontsize=SIZE,
            title_fontsize=SIZE,
            alignment="left",
            borderpad=0,
            labelspacing=0.25,
        )
    return figure


def draw_inducing_size(record: Path) -> Figure:
    """Metrics by the size of the inducing matrices: means over seeds, and single seeds."""
    found = read(record)
    figure = Figure(figsize=(NARROW, 5.2), layout="constrained")
    panels = figure.subplots(3, 2, sharex=True)
    titles = ("ARC-Easy, trained on", "OpenBookQA, shifted")
    metrics = {"acc": ("ACC ↑, %", 100), "nll": ("NLL ↓", 1), "ece": ("ECE ↓, %", 100)}
    for column, (rows, colour, title) in enumerate(
        zip(found["sections"].values(), (BLUE, VERMILION), titles, strict=True)
    ):
        for axes, (metric, (name, factor)) in zip(panels[:, column], metrics.items(), strict=True):
            values = [[factor * run["metrics"][metric] for run in row["runs"]] for row in rows.values()]
            for place, seeds in enumerate(values):
                axes.plot([place] * len(seeds), seeds, "o", color=colour, markersize=2.5, alpha=0.5, markeredgewidth=0)
            axes.plot(range(len(values)), list(map(mean, values)), "o-", color=colour, markersize=5, linewidth=1.4)
            label(axes, y=name if column == 0 else "")
            axes.set_xticks(range(len(rows)), list(rows))
        panels[0, column].set_title(title, fontsize=SIZE + 1)
        panels[-1, column].set_xlabel("inducing rows and columns", fontsize=SIZE)
    return figure


SIDES = {"ece": ("ECE in %", 100), "nll": ("NLL", 1), "acc": ("accuracy in %", 100)}

KINDS: dict[str, dict[str, Any]] = {
    "another trial": {"marker": "o", "color": BLUE, "markersize": 4.5, "fillstyle": "none", "markeredgewidth": 1},
    "on the front": {"marker": "o", "color": BLUE, "markersize": 5.5, "markeredgewidth": 0},
    "LoRA": {"marker": "D", "color": INK, "markersize": 4.5},
    "chosen": {"marker": "*", "color": VERMILION, "markersize": 10, "markeredgewidth": 0},
}


def draw_tuning(search: Path, trials: Path) -> Figure:
    """The feasible trials of a search in each pair of its objectives, and how the hypervolume grew."""
    found = read(search)
    chosen, front = found["chosen"]["number"], {it["number"] for it in found["front"]}
    points: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in KINDS}
    for trial in read(trials)["trials"]:
        if (number := trial["number"]) in found["feasible"]:
            kind = "chosen" if number == chosen else "on the front" if number in front else "another trial"
            points[kind].append(trial["outcomes"])
    points["LoRA"].append(found["baseline"])
    (bound,) = found["bounds"].values()
    figure = Figure(figsize=(NARROW, 5), layout="constrained")
    panels = figure.subplots(2, 2)
    for axes, (first, second) in zip(panels.flat, (("ece", "nll"), ("ece", "acc"), ("nll", "acc")), strict=False):
        for kind, style in KINDS.items():
            x, y = ([SIDES[name][1] * it[name] for it in points[kind]] for name in (first, second))
            axes.plot(x, y, linestyle="", label=kind, **style)
        if second == "acc":
            axes.axhline(100 * bound, color=VERMILION, linestyle="--", linewidth=1)
        label(axes, SIDES[first][0], SIDES[second][0])
    volumes, axes = found["hypervolumes"], panels[1, 1]
    axes.step(range(1, len(volumes) + 1), [100 * it / volumes[-1] for it in volumes], where="post", color=BLUE)
    label(axes, "trials", "hypervolume, % of the last")
    axes.set_yticks(range(0, 101, 20))
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside lower center", ncols=4, fontsize=SIZE, columnspacing=1.2, handletextpad=0.2
    )
    return figure


GROWN = {
    "layers": "layers",
    "rank": "rank",
    "rows": "rows of 128 tokens",
    "draws": "draws of a prediction",
    "components": "components",
}
CURVES = {
    "bayesian-lora, train": ("Bayesian-LoRA, step", BLUE, "o-"),
    "peft lora, train": ("LoRA, step", VERMILION, "^-"),
    "bayesian-lora, predict": ("Bayesian-LoRA, prediction", BLUE, "o--"),
    "peft lora, predict": ("LoRA, prediction", VERMILION, "^--"),
}


def draw_growth(record: Path) -> Figure:
    """Milliseconds of steps and predictions against the sizes of ``bayeslora bench growth``, a panel for each."""
    rows = read(record)["rows"]
    figure = Figure(figsize=(NARROW, 6.6), layout="constrained")
    panels = figure.subplots(3, 2)
    for axes, (axis, title) in zip(panels.flat, GROWN.items(), strict=False):
        values: list[int] = []
        for who, (name, colour, style) in CURVES.items():
            found = [row for row in rows if row["who"] == who and row["what"].startswith(f"growth {axis} ")]
            values = [int(row["what"].split()[-1]) for row in found]
            times = [1000 * row["figures"]["median"] for row in found]
            axes.loglog(values, times, style, color=colour, markersize=3.5, linewidth=1.2, label=name)
        axes.set_ylim(8, 450)
        label_logarithmic(axes, values, title)
    for axes in panels[:, 0]:
        axes.set_ylabel("milliseconds", fontsize=SIZE)
    panels[-1, -1].axis("off")
    panels[-1, -1].legend(*panels[0, 0].get_legend_handles_labels(), loc="center", fontsize=SIZE)
    return figure


def label_logarithmic(axes: Axes, values: Iterable[int], x: str) -> None:
    """Labels and a grid for a panel with logarithmic axes and these values."""
    axes.set_xticks(list(values), list(map(str, values)))
    axes.set_yticks([10, 30, 100, 300])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(x, fontsize=SIZE)
    axes.tick_params(labelsize=SIZE - 0.5)
    axes.grid(color=GREY, alpha=0.25)
    axes.set_axisbelow(True)
