"""Pictures of measured results, drawn from the records in ``benchmarks/results``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from picture_style import BLUE, GREY, INK, PAPER, VERMILION

NARROW = 4.4
"""Width in inches at which text can be read on a phone."""

SHOWN = {
    "lora": ("LoRA", VERMILION, "--"),
    "deep-ensemble": ("ensemble of three LoRAs", GREY, "-."),
    "bayesian-lora": ("Bayesian-LoRA", BLUE, "-"),
}


def draw_confidence(results: Path) -> Figure:
    """How sure the quickstart's models say they are, and how often they are right."""
    figure = Figure(figsize=(NARROW, 2.6), layout="constrained")
    axes = figure.add_subplot(xlim=(0.48, 0.78), xlabel="share of 200 test questions")
    names = {"lora": ("LoRA", VERMILION), "bayesian-lora": ("Bayesian-LoRA", BLUE)}
    files = sorted(results.glob("seed-*.json"))
    ticks = {}
    for row, (method, (name, colour)) in enumerate(names.items()):
        for k, file in enumerate(files):
            metrics = json.loads(file.read_text(encoding="utf-8"))[method]["metrics"]
            y = row * (len(files) + 1) + k
            axes.plot([metrics["acc"], metrics["confidence"]], [y, y], color=colour, linewidth=3, alpha=0.45, zorder=1)
            axes.scatter(metrics["acc"], y, s=50, facecolor=PAPER, edgecolor=colour, linewidth=1.8, zorder=2)
            axes.scatter(metrics["confidence"], y, s=55, color=colour, marker="D", zorder=2)
            ticks[y] = f"{name}, seed {k}"
    axes.scatter([], [], s=50, facecolor=PAPER, edgecolor=INK, linewidth=1.8, label="is right")
    axes.scatter([], [], s=55, color=INK, marker="D", label="says it is right")
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.legend(loc="outside upper right", ncols=2)
    return figure


def read(path: Path) -> Any:
    """A record."""
    return json.loads(path.read_text(encoding="utf-8"))


def nlls(record: Mapping[str, Any]) -> dict[int, float]:
    """NLL by seed of a method's runs on one task."""
    return {run["seed"]: run["metrics"]["nll"] for run in record["runs"]}


def draw_main_table(sections: Mapping[str, Any]) -> Figure:
    """NLL of all methods that have every task, as a difference from LoRA's with the same seeds, best mean first."""

    def gap(rows: Mapping[str, Any], method: str) -> float:
        lora = nlls(rows["lora"])
        return mean(own - lora[seed] for seed, own in nlls(rows[method]).items())

    gaps = {
        method: [gap(rows, method) for rows in sections.values()]
        for method in next(iter(sections.values()))
        if method != "zero-shot" and all(method in rows for rows in sections.values())
    }
    order = sorted(gaps, key=lambda method: mean(gaps[method]))
    figure = Figure(figsize=(NARROW, 3.2), layout="constrained")
    axes = figure.add_subplot(xlabel=f"NLL minus LoRA's, {len(sections)} benchmarks")
    axes.axvline(0, color=INK, linewidth=0.8, alpha=0.5)
    for row, method in enumerate(order):
        colour = SHOWN[method][1] if method in SHOWN else GREY
        axes.scatter(gaps[method], [row] * len(sections), s=14, color=colour, alpha=0.6, zorder=2)
        axes.scatter(mean(gaps[method]), row, s=46, color=colour, marker="D", zorder=3)
    axes.set_yticks(range(len(order)), order)
    axes.get_yticklabels()[order.index("bayesian-lora")].set_fontweight("bold")
    axes.grid(axis="x", color=GREY, alpha=0.25)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    return figure


def draw_unstopped(main: Mapping[str, Any], longer: Mapping[int, Mapping[str, Any]]) -> Figure:
    """NLL after more epochs than are good, without early stopping: the mean over seeds, and every seed."""
    figure = Figure(figsize=(NARROW, 2.7), layout="constrained")
    names = {"arc-challenge": "ARC-Challenge", "winogrande-s": "WinoGrande-S"}
    styles = {"lora": SHOWN["lora"], "blob": ("BLoB", GREY, "-."), "bayesian-lora": SHOWN["bayesian-lora"]}
    for axes, (task, title) in zip(figure.subplots(1, 2), names.items(), strict=True):
        for method, (label, colour, line) in styles.items():
            found = {epochs: nlls(sections[task][method]) for epochs, sections in longer.items()}
            if method != "bayesian-lora":  # four epochs are its own number
                found = {1: nlls(main[task][method]), **found}
            axes.plot(
                list(found),
                [mean(of.values()) for of in found.values()],
                line,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.8,
                label=label,
            )
            for epochs, of in found.items():
                axes.scatter([epochs] * len(of), list(of.values()), s=9, color=colour, alpha=0.5, linewidth=0)
        axes.set(title=title, xlabel="epochs", ylim=(0.5, 3), xticks=[1, 4, 8])
        axes.grid(axis="y", color=GREY, alpha=0.25)
    figure.axes[0].set_ylabel("NLL of test answers")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_main_reliability(record: Path) -> Figure:
    """How often answers are right, against how sure the model says it is, before and after calibration."""
    figure = Figure(figsize=(NARROW, 2.7), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, stage, title in zip(panels, ("raw", "calibrated"), ("as trained", "after calibration"), strict=True):
        axes.plot([0.3, 1], [0.3, 1], color=INK, linewidth=0.8, alpha=0.5)
        for method, (name, colour, line) in SHOWN.items():
            bins = read(record)["methods"][method][stage]["bins"]
            kept = [k for k, count in enumerate(bins["count"]) if count >= 100]
            points = ([bins[key][k] for k in kept] for key in ("confidence", "accuracy"))
            axes.plot(*points, line, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=name)
        axes.set(title=title, xlabel="says", xlim=(0.3, 1.01), ylim=(0.3, 1.01))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
    panels[0].set_ylabel("is right")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def draw_main_risk(record: Path) -> Figure:
    """Wrong answers among the surest ones."""
    figure = Figure(figsize=(NARROW, 2.7), layout="constrained")
    axes = figure.add_subplot(xlabel="questions answered, the surest first", ylabel="of these answers are wrong")
    for method, (name, colour, line) in SHOWN.items():
        curve = read(record)["methods"][method]["raw"]
        axes.plot(curve["coverage"], curve["risk"], line, color=colour, linewidth=1.8, label=name)
    axes.set(xlim=(0, 1.01), ylim=(0, None))
    axes.grid(color=GREY, alpha=0.25)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(loc="upper left")
    return figure


def draw_frontier(record: Path) -> Figure:
    """NLL against the time of a prediction, by the layers in which draws differ."""
    figure = Figure(figsize=(NARROW, 2.8), layout="constrained")
    axes = figure.add_subplot(xlabel="time of a prediction, the posterior mean is 1", ylabel="NLL")
    rows = read(record)["rows"]
    for form, name, style, colour in (
        ("late draws", "four draws above a cut", "o-", BLUE),
        ("trained", "trained with the cut", "s--", VERMILION),
    ):
        shown = sorted((row for row in rows if row["form"] == form), key=lambda row: row["cost"])
        axes.plot([row["cost"] for row in shown], [row["nll"] for row in shown], style, color=colour, label=name)
        for row in shown:
            place = (row["cost"], row["nll"])
            axes.annotate(row["cut"], place, xytext=(4, 4), textcoords="offset points", fontsize=7.5)
    (mean_row,) = (row for row in rows if row["form"] == "mean")
    axes.plot(mean_row["cost"], mean_row["nll"], "X", color=INK, markersize=7, label="posterior mean")
    axes.margins(0.15)
    axes.grid(color=GREY, alpha=0.25)
    axes.legend()
    return figure


def draw_surest(record: Path, title: str) -> Figure:
    """Right answers among the surest ones, with intervals. ``bayesian-lora`` was its preset ``inducing`` then."""
    figure = Figure(figsize=(NARROW, 3.6), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="right answers")
    rows = read(record)["rows"]
    kinds = (
        ("acc_at_50", "surest 50 %", "D", BLUE),
        ("acc_at_80", "surest 80 %", "s", VERMILION),
        ("acc", "all", "o", GREY),
    )
    for k, (key, label, marker, colour) in enumerate(kinds):
        found = [row[key] for row in rows.values()]
        places = [row + 0.24 * (k - 1) for row in range(len(found))]
        axes.hlines(places, [it["low"] for it in found], [it["high"] for it in found], color=colour, linewidth=1.4)
        axes.scatter([it["value"] for it in found], places, s=26, color=colour, marker=marker, label=label, zorder=2)
    names = {"deep-ensemble": "deep\nensemble", "bayesian-lora": "bayesian-lora\n(inducing)"}
    axes.set_yticks(range(len(rows)), [names.get(method, method) for method in rows])
    axes.grid(axis="x", color=GREY, alpha=0.25)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_words(record: Path) -> Figure:
    """Answers whose words are shaded by their uncertainty."""
    answers = read(record)["answers"]
    figure = Figure(figsize=(NARROW, 0.62 * len(answers) + 0.1))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(len(answers), 0))
    axes.axis("off")
    for row, answer in enumerate(answers):
        known = "learnt" if answer["known"] else "not in the training data"
        axes.text(0.02, row + 0.28, f"{answer['question']}  ({known})", fontsize=7.5, alpha=0.75, va="center")
        place = write_shaded(axes, answer["tokens"], row + 0.68)
        others = ", ".join(text.rpartition(" is ")[2].rstrip(".") for text, _ in answer["alternatives"])
        if others:
            axes.text(place + 0.03, row + 0.68, f"or: {others}", fontsize=7.5, alpha=0.75, va="center")
    return figure


def write_shaded(axes: Axes, tokens: Sequence[Mapping[str, Any]], y: float) -> float:
    """Write tokens next to each other, the more uncertain the darker; returns where they end."""
    x = 0.02
    for token in tokens:
        if token["text"].startswith("<|"):
            continue
        entropy = token["aleatoric"] + token["epistemic"]
        drawn = axes.text(x, y, token["text"].replace(" ", "\u00a0"), fontsize=10, va="center")
        box = drawn.get_window_extent().transformed(axes.transData.inverted())
        shade = min(0.75, 0.3 * entropy)
        axes.add_patch(Rectangle((x, y - 0.2), box.x1 - x, 0.4, color=VERMILION, alpha=shade, linewidth=0))
        x = box.x1
    return x
