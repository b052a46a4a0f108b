"""Draws the pictures of the documentation into ``docs/pictures/``: ``python docs/pictures.py``, a minute on one core.

Everything that is drawn was computed: by the library on two toys (``examples/posterior.py`` has the frozen network, and the
moons), or in studies whose records are in ``benchmarks/results``. The same versions draw the same pictures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from bayeslora.figures import draw_reliability
from bayeslora.metrics import (
    conformal_sets,
    conformal_threshold,
    entropy_split,
    mean_set_size,
    nll,
    risk_coverage,
)
from bayeslora.posterior import InducingConfig, InducingPosterior, PointPosterior, Posterior

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks/results"
sys.path.insert(0, str(HERE.parent / "examples"))
sys.path.insert(0, str(HERE.parent / "benchmarks"))
sys.path.insert(0, str(HERE))
from badges import draw_badges  # noqa: E402
from picture_style import BLUE, GREY, INK, STYLE, VERMILION, save  # noqa: E402
from records import read_sections  # noqa: E402
from report_pictures import draw_comparison, draw_growth, draw_inducing_size, draw_tuning  # noqa: E402
from result_pictures import (  # noqa: E402
    NARROW,
    draw_confidence,
    draw_frontier,
    draw_main_reliability,
    draw_main_risk,
    draw_main_table,
    draw_surest,
    draw_unstopped,
    draw_words,
)

import posterior as toy  # noqa: E402

GRID = torch.linspace(-4, 4, 97)
DRAWS = 64


class Line(NamedTuple):
    """Both methods on a line: coins on the left, one class on the right, nothing between and beyond."""

    x: Tensor
    y: Tensor
    lora: Tensor
    draws: Tensor
    mean: Tensor
    posterior: Posterior


class Moons(NamedTuple):
    """Probabilities of both methods on the test points of noisy moons, and the logits of the draws."""

    labels: Tensor
    probabilities: dict[str, Tensor]
    draws: Tensor
    mean: Tensor


def on_line(x: Tensor) -> Tensor:
    """Points of the plane that the toy's network takes."""
    return torch.stack([x, torch.zeros_like(x)], dim=1)


def learn_line(each: int = 48, seed: int = 2) -> Line:
    """Fit LoRA and Bayesian-LoRA to the same points."""
    generator = torch.Generator().manual_seed(seed)
    network = toy.FrozenNetwork(generator)
    x = torch.cat([-3 + 2 * torch.rand(each, generator=generator), 0.8 + 1.4 * torch.rand(each, generator=generator)])
    coins = torch.randint(2, (each,), generator=generator)
    y = torch.cat([coins, torch.ones(each, dtype=torch.long)])
    lora, posterior = PointPosterior(toy.LAYERS), InducingPosterior(toy.LAYERS, InducingConfig(init_sd_u=0.1))
    toy.STEPS = 600
    toy.fit(lora, network, on_line(x), y, 1e-3)
    toy.fit(posterior, network, on_line(x), y, 2e-3)
    with torch.no_grad():
        logits = [
            network(on_line(GRID), factors)
            for factors in (
                lora.mean(),
                posterior.draw(DRAWS, torch.Generator().manual_seed(1)),
                posterior.mean(),
            )
        ]
    return Line(x, y, logits[0][0], logits[1], logits[2][0], posterior)


def learn_moons(seed: int = 0) -> Moons:
    """The problem of ``examples/posterior.py``."""
    generator = torch.Generator().manual_seed(seed)
    network = toy.FrozenNetwork(generator)
    x, y = toy.noisy_moons(toy.TRAIN, generator)
    test_x, test_y = toy.noisy_moons(toy.TEST, generator)
    lora, posterior = PointPosterior(toy.LAYERS), InducingPosterior(toy.LAYERS)
    toy.STEPS = 300
    toy.fit(lora, network, x, y, toy.METHODS["LoRA"][1])
    toy.fit(posterior, network, x, y, toy.METHODS["Bayesian-LoRA"][1])
    with torch.no_grad():
        point = network(test_x, lora.mean())[0].softmax(-1)
        draws = network(test_x, posterior.draw(DRAWS, torch.Generator().manual_seed(1)))
        mean = network(test_x, posterior.mean())[0]
    return Moons(test_y, {"LoRA": point, "Bayesian-LoRA": draws.softmax(-1).mean(0)}, draws, mean)


def second(logits: Tensor) -> Tensor:
    """Probability of the class that the right-hand points have."""
    return logits.softmax(-1)[..., 1]


def show_points(axes: Axes, line: Line) -> None:
    """The training points as ticks above and below."""
    for label in (0, 1):
        at = line.x[line.y == label]
        axes.plot(at, torch.full_like(at, -0.05 + 1.1 * label), "|", color=INK, markersize=5, alpha=0.7)
    axes.set(ylim=(-0.1, 1.1), xlim=(-4, 4), yticks=(0, 0.5, 1), xlabel="input")


def draw_posterior(line: Line) -> Figure:
    """One curve, and many."""
    figure = Figure(figsize=(NARROW, 4.4), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    upper.plot(GRID, second(line.lora), color=VERMILION, linewidth=1.8)
    lower.plot(GRID, second(line.draws[:14]).T, color=GREY, linewidth=0.5, alpha=0.8)
    lower.plot(GRID, second(line.draws).mean(0), color=BLUE, linewidth=2.2)
    titles = ("LoRA: one set of weights", "Bayesian-LoRA: 14 draws, and their average")
    for axes, title in zip((upper, lower), titles, strict=True):
        show_points(axes, line)
        axes.set(title=title, ylabel="probability of class 1")
    return figure


def draw_update(line: Line) -> Figure:
    """The update of one layer: mean, two draws, and how far draws scatter."""
    with torch.no_grad():
        draws = line.posterior.draw(DRAWS, torch.Generator().manual_seed(1)).product("first")
        mean = line.posterior.mean().product("first")[0]
    shown = {"mean": mean, "one draw": draws[0], "another draw": draws[2], "standard deviation": draws.std(0)}
    figure = Figure(figsize=(NARROW, 4), layout="constrained")
    top = float(draws[[0, 2]].abs().max())
    panels = figure.subplots(2, 2)
    for axes, (name, matrix) in zip(panels.flat, shown.items(), strict=True):
        image = axes.imshow(matrix[:32, :32], cmap="gray", vmin=-top, vmax=top, interpolation="nearest")
        axes.set(title=name, xticks=(), yticks=())
        axes.spines[:].set_visible(True)
    figure.colorbar(image, ax=panels, shrink=0.85, ticks=(-round(0.8 * top, 2), 0, round(0.8 * top, 2)))
    return figure


def draw_averaging(line: Line, moons: Moons) -> Figure:
    """Three ways to make one prediction of many draws, and what each is worth."""
    figure = Figure(figsize=(NARROW, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(2, 1))
    ways = {
        "average of probabilities": (second(line.draws).mean(0), moons.draws.softmax(-1).mean(0), "-", BLUE),
        "softmax of average logits": (second(line.draws.mean(0)), moons.draws.mean(0).softmax(-1), "--", VERMILION),
        "mean of the weights": (second(line.mean), moons.mean.softmax(-1), ":", INK),
    }
    for name, (curve, _, style, colour) in ways.items():
        upper.plot(GRID, curve, style, color=colour, linewidth=1.8, label=name)
    show_points(upper, line)
    upper.set(ylabel="probability of class 1")
    upper.legend(loc="lower right", fontsize=7.5)
    losses = [nll(p.double(), moons.labels) for _, p, _, _ in ways.values()]
    bars = lower.barh(
        range(3), losses, color=[way[3] for way in ways.values()], alpha=0.85, hatch=["", "//", ""], edgecolor="white"
    )
    lower.bar_label(bars, fmt="%.3f", padding=3)
    lower.set(yticks=range(3), yticklabels=["probabilities", "logits", "weights"], xlim=(0, 1.2 * max(losses)))
    lower.invert_yaxis()
    lower.set(title="NLL on 4,000 new points (moons)", xticks=())
    return figure


def draw_entropy(line: Line) -> Figure:
    """Where the uncertainty comes from, along the line."""
    split = entropy_split(line.draws.softmax(-1).double())
    figure = Figure(figsize=(NARROW, 3), layout="constrained")
    axes = figure.add_subplot(ylabel="entropy (nats)", xlabel="input", xlim=(-4, 4), ylim=(0, 0.95))
    axes.fill_between(GRID, 0, split.aleatoric, color="#A9CFE5", label="aleatoric: in every draw")
    axes.fill_between(
        GRID,
        split.aleatoric,
        split.total,
        facecolor="#F7DFCC",
        edgecolor=VERMILION,
        hatch="////",
        linewidth=0,
        label="epistemic: the draws disagree",
    )
    for low, high, text in ((-3, -1, "learnt:\ncoin flips"), (0.8, 2.2, "learnt:\nalways class 1")):
        axes.annotate("", (low, 0.73), (high, 0.73), arrowprops={"arrowstyle": "|-|", "mutation_scale": 3})
        axes.text((low + high) / 2, 0.745, text, ha="center", va="bottom", fontsize=8)
    axes.text(3.95, 0.745, "never\nseen", ha="right", va="bottom", fontsize=8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2, fontsize=8)
    return figure


def draw_narrow_reliability(moons: Moons, legend_line: float = 0.2) -> Figure:
    """The library's reliability diagrams at the width of a phone, with a second line for the legend."""
    figure = draw_reliability({name: (p, moons.labels) for name, p in moons.probabilities.items()}, page=NARROW)
    low = figure.get_figheight()
    high = low + legend_line
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position().bounds
        axes.set_position((left, (bottom * low + legend_line) / high, width, height * low / high))
    (wide,) = figure.legends
    wide.remove()
    figure.legend(
        wide.legend_handles, [text.get_text() for text in wide.texts], loc="lower center", ncols=2, fontsize=8
    )
    figure.set_figheight(high)
    return figure


def draw_selective(moons: Moons) -> Figure:
    """What abstaining costs, and how large sets must be."""
    figure = Figure(figsize=(NARROW, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    half, levels, labels = len(moons.labels) // 2, np.linspace(0.5, 0.97, 48), moons.labels.numpy()
    held, new = slice(0, half), slice(half, None)
    for (name, tensor), (style, colour) in zip(
        moons.probabilities.items(), (("--", VERMILION), ("-", BLUE)), strict=True
    ):
        p = tensor.double().numpy()
        curve = risk_coverage(p.max(1), p.argmax(1) == labels)
        at = np.searchsorted(curve.coverage, np.linspace(max(0.05, curve.coverage[0]), 1, 120))
        upper.plot(curve.coverage[at], curve.risk[at], style, color=colour, label=name)
        sets = [conformal_sets(p[new], conformal_threshold(p[held], labels[held], level)) for level in levels]
        lower.plot(levels, [mean_set_size(chosen) for chosen in sets], style, color=colour, label=name)
    upper.set(xlabel="share of questions answered", ylabel="error rate", ylim=(0, None))
    lower.set(xlabel="target coverage of the set", ylabel="mean size of the set")
    lower.xaxis.set_major_formatter(PercentFormatter(1))
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    upper.legend()
    return figure


def sections_of(*names: str) -> dict[str, Any]:
    """The sections of records of the main table, by task and method; a name may be a pattern."""
    return read_sections([path for name in names for path in sorted((RESULTS / "main").glob(f"{name}.json"))])


def main() -> None:
    """Draw all of them."""
    draw_badges(HERE / "pictures")
    torch.set_num_threads(1)
    line, moons = learn_line(), learn_moons()
    with rc_context(STYLE):
        figures = {
            "confidence": draw_confidence(RESULTS / "quickstart"),
            "main-table": draw_main_table(sections_of("five-tasks/*", "boolq/*")),
            "unstopped": draw_unstopped(
                sections_of("five-tasks/*"), {epochs: sections_of(f"unstopped-{epochs}") for epochs in (4, 8)}
            ),
            "main-reliability": draw_main_reliability(RESULTS / "main/curves.json"),
            "main-risk": draw_main_risk(RESULTS / "main/curves.json"),
            "frontier": draw_frontier(RESULTS / "frontier/quickstart.json"),
            "arc-easy": draw_surest(RESULTS / "selective/arc-easy.json", "ARC-Easy"),
            "arc-challenge": draw_surest(RESULTS / "selective/arc-challenge.json", "ARC-Challenge"),
            "words": draw_words(RESULTS / "words/larkhaven.json"),
            "comparison": draw_comparison(
                RESULTS / "table" / f"{name}.json" for name in ("arc-easy", "openbookqa", "cut")
            ),
            "growth": draw_growth(RESULTS / "bench/qwen2.5-1.5b-growth.json"),
            "inducing-size": draw_inducing_size(RESULTS / "ablations/inducing-size.json"),
            "tuning": draw_tuning(RESULTS / "tune/arc-easy-tuned.json", RESULTS / "tune/arc-easy-trials.json"),
            "posterior": draw_posterior(line),
            "update": draw_update(line),
            "averaging": draw_averaging(line, moons),
            "entropy": draw_entropy(line),
            "reliability": draw_narrow_reliability(moons),
            "selective": draw_selective(moons),
        }
        (HERE / "pictures").mkdir(exist_ok=True)
        for name, figure in figures.items():
            path = HERE / "pictures" / f"{name}.svg"
            save(figure, path)
            print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
