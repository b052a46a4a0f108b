"""Finished runs of a study: their predictions, and which differences are significant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.figures.table import CALIBRATED, CALIBRATED_COLUMNS, COLUMNS, Cell, Column, Row, best_of
from bayeslora.predict.questions.predictions import (
    read_choices,
    read_distances,
    read_epistemic,
    read_option_counts,
    read_predictions,
)
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult

METRICS = {"acc": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece}
SIGNIFICANT = 0.05


def _aurc(probs: NDArray[Any], labels: NDArray[Any]) -> float:
    return metrics.aurc(probs.max(axis=1), probs.argmax(axis=1) == labels)


PAIRED: Mapping[str, metrics.Metric] = {**METRICS, "aurc": _aurc}
"""Metrics in which the paired bootstrap can compare two methods: means over questions, or functions of them all."""

Places = Mapping[str, Mapping[int, Path]]
"""Directories with results, by the name of a row (a method, a value) and seed."""


@dataclass(frozen=True)
class Evaluated:
    """Results of a run on one test split.

    Attributes:
        seed: of the run.
        result: its ``result.json``.
        ids: of the questions.
        probabilities: ``[N, O]``.
        gold: ``[N]``.
        epistemic: ``[N]``, epistemic uncertainty.
        options: ``[N]``, number of options of each question.
        calibrated: ``[N, O]``, probabilities after calibration, if any.
        distances: ``[N]``, how far the questions are from those of training, if the run has measured it.
    """

    seed: int
    result: RunResult
    ids: tuple[str, ...]
    probabilities: NDArray[np.float64]
    gold: NDArray[np.int64]
    epistemic: NDArray[np.float64]
    options: NDArray[np.int64]
    calibrated: NDArray[np.float64] | None = None
    distances: NDArray[np.float64] | None = None

    @property
    def scores(self) -> dict[str, NDArray[np.float64]]:
        """Scores ``[N]`` that should be higher for questions of another task, by name."""
        found = {"epistemic": self.epistemic, "entropy": np.asarray(metrics.entropy(self.probabilities))}
        return found if self.distances is None else {**found, "distance": self.distances}


def load_evaluated(path: Path, seed: int) -> Evaluated | None:
    """Load the run in a directory, or ``None`` if it is not finished."""
    directory = RunDirectory(path)
    if not directory.result.exists():
        return None
    ids, probabilities, gold = _read_decided(directory.predictions)
    epistemic = read_epistemic(directory.predictions)
    result, calibrated = with_calibrated(directory.read_result()), None
    if result.calibrated is not None:
        _, calibrated, _ = _read_decided(directory.calibrated)
    options = read_option_counts(directory.predictions)
    distances = read_distances(directory.predictions)
    return Evaluated(seed, result, tuple(ids), probabilities, gold, epistemic, options, calibrated, distances)


def _read_decided(path: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.int64]]:
    """Ids, probabilities and gold of saved predictions. Of options that are equal within round-off, the chosen one gets the
    largest probability, so that accuracies are those of the choices."""
    ids, probabilities, gold = read_predictions(path)
    choices = read_choices(path)
    tied = np.flatnonzero(probabilities.argmax(axis=1) != choices)
    probabilities[tied, choices[tied]] = np.nextafter(probabilities[tied].max(axis=1), 2.0)
    return ids, probabilities, gold


def with_calibrated(result: RunResult) -> RunResult:
    """A result with its main metrics after calibration added under prefixed names."""
    after = (result.calibrated or {}).get("metrics", {})
    main = {f"{CALIBRATED}{name}": after[name] for name in PAIRED if name in after}
    return replace(result, metrics={**result.metrics, **main})


def with_calibrated_columns(columns: tuple[Column, ...], names: Iterable[str]) -> tuple[Column, ...]:
    """Add columns for the metrics after calibration, if there are any."""
    return (*columns, *CALIBRATED_COLUMNS) if any(name.startswith(CALIBRATED) for name in names) else columns


def load_all(title: str, places: Places) -> dict[str, list[Evaluated]]:
    """Load the finished runs of a part of the table, by row."""
    found = {
        name: [it for seed, path in runs.items() if (it := load_evaluated(path, seed)) is not None]
        for name, runs in places.items()
    }
    require_same_questions(title, found)
    return found


def require_same_questions(title: str, found: Mapping[str, Sequence[Evaluated]]) -> None:
    """Refuse runs that were not evaluated on the same questions with the same answers."""
    runs = [(method, run) for method, these in found.items() for run in these]
    for method, run in runs[1:]:
        if run.ids != runs[0][1].ids or not np.array_equal(run.gold, runs[0][1].gold):
            raise InputError(
                f"{title}: {method} (seed {run.seed}) and {runs[0][0]} (seed {runs[0][1].seed}) were not evaluated on the "
                "same questions; use a new directory"
            )


def table_rows(found: Mapping[str, Sequence[Evaluated]], columns: Sequence[Column] = COLUMNS) -> dict[str, Row]:
    """A row per method, with the paired bootstrap over questions and seeds against the best."""
    plain = {method: _cells(runs, columns) for method, runs in found.items()}
    best = {column.metric: best_of(plain, column) for column in columns}
    return {
        method: {
            name: Cell(cell.values, _ties(name, found[method], found[best[name] or method], method == best[name]))
            for name, cell in row.items()
        }
        for method, row in plain.items()
    }


def _cells(runs: Sequence[Evaluated], columns: Sequence[Column]) -> dict[str, Cell]:
    """Cells of the metrics that all runs have."""
    names = [column.metric for column in columns]
    return {
        name: Cell(tuple(run.result.metrics[name] for run in runs))
        for name in names
        if runs and all(name in run.result.metrics for run in runs)
    }


def _ties(name: str, mine: Sequence[Evaluated], best: Sequence[Evaluated], is_best: bool) -> bool:
    """Whether the paired bootstrap finds no difference from the best."""
    if is_best:
        return True
    metric = PAIRED.get(name.removeprefix(CALIBRATED))
    if metric is None:
        return False

    def seen(run: Evaluated) -> NDArray[np.float64]:
        after = run.calibrated if name.startswith(CALIBRATED) else run.probabilities
        assert after is not None
        return after

    difference = metrics.paired_bootstrap_over_runs(metric, [*map(seen, mine)], [*map(seen, best)], mine[0].gold)
    return difference.p_value >= SIGNIFICANT


UNIFORM = "uniform guess"
"""Name of the row of uniform predictions."""


def uniform_guess(run: Evaluated) -> dict[str, float]:
    """Expected metrics of equal probabilities for all options, on the questions of a run: chance accuracy, the NLL that any
    method should beat, and no calibration error."""
    return {"acc": float(np.mean(1 / run.options)), "nll": float(np.mean(np.log(run.options))), "ece": 0.0}


def reference_rows(figures: Mapping[str, Mapping[str, float]]) -> dict[str, Row]:
    """Reference rows, which are never marked as the best."""
    return {name: {it: Cell((value,), ranked=False) for it, value in row.items()} for name, row in figures.items()}


def pooled(runs: Sequence[Evaluated]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Concatenated predictions of all seeds."""
    return np.concatenate([run.probabilities for run in runs]), np.concatenate([run.gold for run in runs])


def summary(run: Evaluated) -> dict[str, Any]:
    """Entry of a run in the record of a study: everything but settings and predictions."""
    return summary_of(run.result, run.seed)


def summary_of(result: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Entry of a result in the record of a study."""
    kept = ("metrics", "timing", "memory", "parameters", "counts", "history", "stopped_early", "found", "environment")
    return {"seed": seed, **{name: result[name] for name in kept if name in result}}
