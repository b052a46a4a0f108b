"""How time, memory and launches grow with layers, rank, batch, draws and components, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayeslora.adapter import find_holder
from bayeslora.bench.actions import Predict, TrainStep, count_operators, peak_memory
from bayeslora.bench.config import LORA, parse_batch
from bayeslora.bench.rows import Row
from bayeslora.bench.subjects import Subjects
from bayeslora.bench.timing import time_in_turns
from bayeslora.figures.growth import growth_figure
from bayeslora.progress import Reporter

AXES: dict[str, tuple[int, ...]] = {
    "layers": (8, 16, 32, 64),
    "rank": (4, 8, 16, 32, 64),
    "rows": (1, 2, 4, 8, 16),
    "draws": (1, 2, 4, 8, 16),
    "components": (1, 2, 4, 8),
}
"""What grows, and its values. Everything else is as in the settings of the benchmark."""

GROWTH = "growth"

FIGURES = {"seconds": "median", "bytes, training": "bytes", "operators of a draw": "operators"}
"""Panels of a figure, and what they show."""


def measure_growth(subjects: Subjects, report: Reporter) -> Iterator[Row]:
    """Time a training step and a prediction, and measure memory and operators, at every value of every axis."""
    for axis, values in AXES.items():
        for value in values:
            report.say(f"{GROWTH}: {axis} {value}")
            yield from _at(subjects, axis, value)


def _at(subjects: Subjects, axis: str, value: int) -> Iterator[Row]:
    config, what = subjects.config, f"{GROWTH} {axis} {value}"
    rows, length = parse_batch(config.batches[0])
    if axis == "layers":
        subjects = subjects.changed(replace(config, depth=value))
    elif axis == "rank":
        subjects = subjects.changed(replace(config, rank=value))
    ids = subjects.tokens(value if axis == "rows" else rows, length)
    samples = value if axis == "draws" else max(config.samples)
    settings = {"components": value} if axis == "components" else {}
    models: dict[str, Any] = {LORA: subjects.make(LORA)}
    models |= {name: subjects.make(name, **settings) for name in config.methods if _has(subjects, name, settings)}
    steps = {name: TrainStep(model.train(), ids, name != LORA) for name, model in models.items()}
    yield from _timed(subjects, what, "train", steps, lambda name: _size_of(steps[name], subjects))
    asked = {name: Predict(model.eval(), ids, 0 if name == LORA else samples, "all") for name, model in models.items()}
    yield from _timed(subjects, what, "predict", asked, lambda name: {})


def _has(subjects: Subjects, name: str, settings: dict[str, int]) -> bool:
    """Whether the posterior of a method has these settings."""
    return settings.keys() <= subjects.settings_of(name).keys()


def _size_of(step: TrainStep, subjects: Subjects) -> dict[str, float]:
    """Memory of a training step, and operators of a draw if there is one."""
    figures = {"bytes": float(peak_memory(step, subjects.device))}
    if step.with_kl:
        posterior = find_holder(step.model).posterior("default")
        figures["operators"] = float(count_operators(lambda: posterior.draw(1)))
    return figures


def _timed(
    subjects: Subjects,
    what: str,
    kind: str,
    actions: dict[str, Any],
    more: Callable[[str], dict[str, float]],
) -> Iterator[Row]:
    config = subjects.config
    timings = time_in_turns(actions, subjects.device, repeats=config.repeats, warmup=config.warmup)
    for name, timing in timings.items():
        yield Row(what, f"{name}, {kind}", {"median": timing.median, **more(name)}, timing.ratio_to(timings[LORA]))


def growth_of(rows: Sequence[Row], axis: str, who: str, figure: str) -> list[tuple[int, float]]:
    """The figure of a row's subject at every value of an axis."""
    found = []
    for row in rows:
        kind, _, rest = row.what.partition(" ")
        known, _, value = rest.partition(" ")
        if (kind, known, row.who) == (GROWTH, axis, who) and figure in row.figures:
            found.append((int(value), row.figures[figure]))
    return sorted(found)


def draw_growth(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draw a figure for every axis: seconds, bytes and operators against its value."""
    directory.mkdir(parents=True, exist_ok=True)
    subjects, drawn = sorted({row.who for row in rows if row.what.startswith(GROWTH)}), []
    for axis in AXES:
        panels = {
            title: {who: points for who in subjects if len(points := growth_of(rows, axis, who, figure)) > 1}
            for title, figure in FIGURES.items()
        }
        drawn.append(growth_figure(axis, panels, directory / f"growth-{axis}.svg"))
    return drawn


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """Power of the value with which a figure grows over the last doubling: 1 is linear, 0 is constant."""
    (before, low), (after, high) = points[-2:]
    return math.log(high / low) / math.log(after / before)
