"""Shared parts of study reports: rows of methods with their runs' predictions, and their figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.figures.panel import PAGE as PAGE_WIDTH
from bayeslora.figures.reliability import draw_reliability
from bayeslora.figures.selective import draw_risk_coverage
from bayeslora.figures.table import Cell, Column, Row
from bayeslora.report.blocks import Block, Bounds, Drawing, Links, Note, Plain, Section
from bayeslora.report.questions import Answers, read_answers
from bayeslora.report.reading import numbers
from bayeslora.report.write import PAGE
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.evaluated import Places

Recorded = Mapping[str, Mapping[str, Any]]
"""A part of ``table.json``: runs and ties by the name of a row."""

Answered = Mapping[str, Sequence[Answers]]
"""Answers of all seeds by the name of a row."""

INTERVALS = "Small: 95 % bootstrap interval over the questions, of the mean over the seeds."


def make_rows(recorded: Recorded, columns: Sequence[Column]) -> dict[str, Row]:
    """Rows of cells from the record; a row without runs is blank."""
    rows: dict[str, Row] = {}
    for name, record in recorded.items():
        runs = [numbers(run["metrics"]) for run in record["runs"]]
        ties = record.get("ties_best", {})
        rows[name] = {
            it.metric: Cell(tuple(run[it.metric] for run in runs), bool(ties.get(it.metric, False)))
            for it in columns
            if runs and all(it.metric in run for run in runs)
        }
    return rows


def seeds_of(recorded: Recorded) -> dict[str, list[int]]:
    """Seeds with a result, by row."""
    return {name: [int(run["seed"]) for run in record["runs"]] for name, record in recorded.items()}


def read_all(title: str, recorded: Recorded, places: Places) -> dict[str, list[Answers]]:
    """Read the answers of runs with saved predictions, which must match the record and be on the same questions."""
    found: dict[str, list[Answers]] = {}
    for name, record in recorded.items():
        for run in record["runs"]:
            path = places.get(name, {}).get(int(run["seed"]))
            if path is not None and RunDirectory(path).predictions.exists():
                found.setdefault(name, []).append(read_answers(path, numbers(run["metrics"])))
    runs = [answers for these in found.values() for answers in these]
    if any(it.ids != runs[0].ids or not np.array_equal(it.gold, runs[0].gold) for it in runs):
        raise InputError(
            f"{title}: its runs were not evaluated on the same questions; use a new directory for the study"
        )
    return found


def bounds_of(answered: Answered) -> Bounds:
    """Intervals of the main metrics, by row."""
    found = {}
    for name, runs in answered.items():
        gold, plain = runs[0].gold, [it.probabilities for it in runs]
        chosen = [np.eye(it.probabilities.shape[1])[it.choices] for it in runs]
        intervals = {
            "acc": metrics.bootstrap_interval_over_runs(metrics.accuracy, chosen, gold),
            "nll": metrics.bootstrap_interval_over_runs(metrics.nll, plain, gold),
            "ece": metrics.bootstrap_interval_over_runs(metrics.ece, plain, gold),
        }
        found[name] = {metric: (it.low, it.high) for metric, it in intervals.items()}
    return found


def answer_figures(name: str, answered: Answered) -> list[Drawing]:
    """Reliability and risk-coverage figures of all methods, with seeds pooled."""
    pooled = {method: _pooled(runs) for method, runs in answered.items()}
    errors = {method: metrics.ece(*it) for method, it in pooled.items()}
    answers = {
        method: (np.concatenate([it.confidence for it in runs]), np.concatenate([it.correct for it in runs]))
        for method, runs in answered.items()
    }
    areas = ", ".join(f"{method} {metrics.aurc(*it):.3f}" for method, it in answers.items())
    return [
        Drawing(
            f"risk-coverage-{name}",
            draw_risk_coverage(answers),
            "Risk and coverage: errors among the most confident answers; lower is better.",
            f"Risk-coverage curves; areas below them: {areas}.",
        ),
        Drawing(
            f"reliability-{name}",
            draw_reliability(pooled, page=PAGE_WIDTH),
            "Reliability of all methods, seeds together: how often answers of a given confidence are right. A hatched gap above "
            "its bar is overconfidence.",
            "Reliability diagrams; expected calibration errors: "
            + ", ".join(f"{method} {error:.3f}" for method, error in errors.items())
            + ".",
            wide=len(pooled) > 1,
        ),
    ]


def runs_section(places: Mapping[str, Path], out: Path) -> Section:
    """Links to existing reports of runs, by label; ``places`` are paths of runs."""
    pages = {label: path / "report" / PAGE for label, path in places.items()}
    links = {_relative(page, out): label for label, page in pages.items() if page.exists()}
    return Section("Reports of single runs", [Links(links)] if links else [])


def failures_section(
    failures: Mapping[str, Any], gaps: Sequence[str], then: str = "the same command tries them again"
) -> Section:
    """List failed runs, what happens to them ``then``, and other missing results."""
    blocks: list[Block] = []
    if failures:
        rows = [[str(what), str(why)] for what, why in failures.items()]
        blocks.append(Plain("failures", ["run", "why"], rows, f"{len(rows)} failed; {then}."))
    if gaps:
        blocks.append(Note(f"Without a result: {'; '.join(gaps)}.", warning=True))
    return Section("Failures and gaps", blocks)


def gaps_of(title: str, recorded: Recorded, seeds: Sequence[int]) -> list[str]:
    """Describe rows with missing seeds."""
    missing = {name: [seed for seed in seeds if seed not in have] for name, have in seeds_of(recorded).items()}
    return [
        f"{title}, {name} (seed{'s' if len(some) > 1 else ''} {', '.join(map(str, some))})"
        for name, some in missing.items()
        if some
    ]


def _relative(page: Path, out: Path) -> str:
    return Path(os.path.relpath(page, out)).as_posix()


def _pooled(runs: Sequence[Answers]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    return np.concatenate([it.probabilities for it in runs]), np.concatenate([it.gold for it in runs])
