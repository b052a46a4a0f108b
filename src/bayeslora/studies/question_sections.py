"""Parts of a study's table for questions with options: on the task that was learnt, or on another one.

On another task a method should notice that the questions are not of the kind it has learnt. How well its uncertainty tells
them from those of its own task is the AUROC of

- the epistemic part, which is the disagreement between draws: methods without draws have none;
- the whole entropy of the averaged prediction, which every method has, to hold the first against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bayeslora import metrics
from bayeslora.figures.table import COLUMNS, Column, Row
from bayeslora.studies.evaluated import (
    UNIFORM,
    Evaluated,
    Places,
    load_all,
    load_evaluated,
    reference_rows,
    summary,
    table_rows,
    uniform_guess,
    with_calibrated_columns,
)

SHIFT_COLUMNS: tuple[Column, ...] = (
    *COLUMNS,
    Column("aurc", "AURC ↓"),
    Column("shift_auroc_epistemic", "AUROC, epistemic ↑", largest=True),
    Column("shift_auroc_entropy", "AUROC, entropy ↑", largest=True),
)
ABLATION_COLUMNS: tuple[Column, ...] = (*COLUMNS, Column("epistemic", "epistemic", ranked=False))
PARAMETERS = Column("trainable", "parameters", ranked=False, digits=0)


@dataclass(frozen=True)
class QuestionSection:
    """A part of the table.

    Attributes:
        columns: what is shown.
        rows: by method.
        found: the runs that the rows were made from, by method.
    """

    columns: tuple[Column, ...]
    rows: dict[str, Row]
    found: Mapping[str, Sequence[Evaluated]]

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """What every row is held against: a uniform guess."""
        first = next((run for runs in self.found.values() for run in runs), None)
        return {} if first is None else {UNIFORM: uniform_guess(first)}

    @property
    def all_rows(self) -> dict[str, Row]:
        """The rows and what they are held against."""
        return {**self.rows, **reference_rows(self.references)}

    @property
    def record(self) -> dict[str, Any]:
        """What the rows were made from, without the predictions."""
        return {
            name: {
                "runs": [summary(run) for run in runs],
                "ties_best": {metric: cell.ties_best for metric, cell in self.rows[name].items()},
            }
            for name, runs in self.found.items()
        }


def question_section(title: str, places: Places, columns: tuple[Column, ...] = COLUMNS) -> QuestionSection:
    """Results on one test split, side by side."""
    return _section(load_all(title, places), columns)


def shift_section(title: str, places: Places, own: Places) -> QuestionSection:
    """The same on another task than was learnt; ``own`` are the results of the same runs on their own one."""
    found = {
        name: [
            with_detection(run, inside)
            for run in runs
            if (inside := load_evaluated(own[name][run.seed], run.seed)) is not None
        ]
        for name, runs in load_all(title, places).items()
    }
    return _section(found, SHIFT_COLUMNS)


def with_detection(shifted: Evaluated, own: Evaluated) -> Evaluated:
    """A result with the AUROCs of telling its questions from those of the run's own task."""
    entropies = metrics.entropy(own.probabilities), metrics.entropy(shifted.probabilities)
    found = {"shift_auroc_entropy": metrics.shift_auroc(*entropies)}
    if own.epistemic.any() or shifted.epistemic.any():
        found["shift_auroc_epistemic"] = metrics.shift_auroc(own.epistemic, shifted.epistemic)
    return replace(shifted, result={**shifted.result, "metrics": {**shifted.result["metrics"], **found}})


def is_shift(columns: Sequence[Column]) -> bool:
    """Whether a part is about another task than was learnt."""
    return SHIFT_COLUMNS[-1] in columns


def _section(found: Mapping[str, Sequence[Evaluated]], columns: tuple[Column, ...]) -> QuestionSection:
    names = {name for runs in found.values() for run in runs for name in run.result["metrics"]}
    shown = with_calibrated_columns(columns, names)
    return QuestionSection(shown, table_rows(found, shown), found)
