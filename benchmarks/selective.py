"""Answering only when sure: risk against coverage of the runs of a comparison, over all its seeds.

python benchmarks/selective.py STUDY --task arc-challenge --out result.json --figure selective.svg

STUDY is the directory of `bayeslora compare`. Figures are means over the seeds; intervals hold 95 % of resamples of the
questions, the same for all seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from records import command, runs_of

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.report.reading import read_record
from bayeslora.studies.evaluated import Evaluated, require_same_questions

STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--")


def confident(probabilities: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence of each answer, and whether it is right."""
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == gold


def at_coverage(coverage: float) -> Callable[[np.ndarray, np.ndarray], float]:
    """Accuracy of the surest answers."""
    return lambda p, y: metrics.accuracy_at_coverage(*confident(p, y), coverage)


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "aurc": lambda p, y: metrics.aurc(*confident(p, y)),
    "acc_at_50": at_coverage(0.5),
    "acc_at_80": at_coverage(0.8),
    "acc": metrics.accuracy,
}


def load(study: Path, task: str, methods: Sequence[str]) -> dict[str, list[Evaluated]]:
    """The runs of the table, by method."""
    record = read_record(study / "table.json")
    found = {method: runs_of(study, record, task, method) for method in methods}
    for method, runs in found.items():
        if len(runs) < len(record["study"]["seeds"]):
            raise InputError(f"{study}: {method} on {task} is not complete; let bayeslora compare end first")
    require_same_questions(task, found)
    return found


def row(runs: Sequence[Evaluated]) -> dict[str, Any]:
    """All figures of a method with their intervals."""
    figures = {}
    for name, metric in METRICS.items():
        interval = metrics.bootstrap_interval_over_runs(metric, [run.probabilities for run in runs], runs[0].gold)
        figures[name] = {"value": interval.value, "low": interval.low, "high": interval.high}
    return figures


def curve(runs: Sequence[Evaluated], points: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy of the surest answers at every coverage, mean over the seeds."""
    coverage = np.linspace(0.1, 1.0, points)
    return coverage, np.mean([[at_coverage(c)(run.probabilities, run.gold) for c in coverage] for run in runs], axis=0)


def draw(found: dict[str, list[Evaluated]], task: str, path: Path) -> None:
    """One line for each method."""
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axis = figure.subplots()
    for (method, runs), style in zip(found.items(), itertools.cycle(STYLES), strict=False):
        coverage, accuracy = curve(runs)
        axis.plot(100 * coverage, 100 * accuracy, style, markevery=12, markersize=4, label=method)
    axis.set(xlabel="questions answered, the surest first (%)", ylabel="right answers among them (%)", title=task)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Compute, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--task", default="arc-challenge")
    parser.add_argument("--methods", nargs="+", default=["lora", "temperature", "deep-ensemble", "bayesian-lora"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path, default=None)
    given = parser.parse_args()
    found = load(given.study, given.task, given.methods)
    record: dict[str, Any] = {"schema": 1, "task": given.task, "questions": len(next(iter(found.values()))[0].gold)}
    record["seeds"] = [run.seed for run in next(iter(found.values()))]
    record["rows"] = {method: row(runs) for method, runs in found.items()}
    record["environment"] = next(iter(found.values()))[0].result["environment"]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for method, figures in record["rows"].items():
        told = (f"{name} {f['value']:.4f} [{f['low']:.4f}, {f['high']:.4f}]" for name, f in figures.items())
        print(f"{method:16}", "  ".join(told))
    if given.figure is not None:
        draw(found, given.task, given.figure)


if __name__ == "__main__":
    command(main)
