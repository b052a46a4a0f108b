"""Parts of a study's table for questions with options: on the training task, or on another one.

On another task a method should detect that the questions are out of distribution. How well its uncertainty separates them
from those of its own task is the AUROC of

- the epistemic part, which is the disagreement between draws: methods without draws have none;
- the whole entropy of the averaged prediction, which every method has, for comparison;
- the distance of a question's features from those of the training questions, if the runs have measured it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bayeslora.figures.table import COLUMNS, Column, Row
from bayeslora.predict.questions.familiarity import tell_apart
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
DISTANCE_COLUMN = Column("shift_auroc_distance", "AUROC, distance ↑", largest=True)
ABLATION_COLUMNS: tuple[Column, ...] = (*COLUMNS, Column("epistemic", "epistemic", ranked=False))
PARAMETERS = Column("trainable", "parameters", ranked=False, digits=0)


@dataclass(frozen=True)
class QuestionSection:
    """A part of the table.

    Attributes:
        columns: columns to show.
        rows: rows by method.
        found: the runs of the rows, by method.
    """

    columns: tuple[Column, ...]
    rows: dict[str, Row]
    found: Mapping[str, Sequence[Evaluated]]

    @property
    def references(self) -> dict[str, dict[str, float]]:
        """Reference of every row: a uniform guess."""
        first = next((run for runs in self.found.values() for run in runs), None)
        return {} if first is None else {UNIFORM: uniform_guess(first)}

    @property
    def all_rows(self) -> dict[str, Row]:
        """The rows and the reference rows."""
        return {**self.rows, **reference_rows(self.references)}

    @property
    def record(self) -> dict[str, Any]:
        """Data of the rows, without the predictions."""
        return {
            name: {
                "runs": [summary(run) for run in runs],
                "ties_best": {metric: cell.ties_best for metric, cell in self.rows[name].items()},
            }
            for name, runs in self.found.items()
        }


def question_section(title: str, places: Places, columns: tuple[Column, ...] = COLUMNS) -> QuestionSection:
    """Results of all rows on one test split."""
    return _section(load_all(title, places), columns)


def shift_section(title: str, places: Places, own: Places) -> QuestionSection:
    """Results on another than the training task; ``own`` are the results of the same runs on the training task."""
    found = {
        name: [
            with_detection(run, inside)
            for run in runs
            if (inside := load_evaluated(own[name][run.seed], run.seed)) is not None
        ]
        for name, runs in load_all(title, places).items()
    }
    return _section(found, shift_columns(_metrics_of(found)))


def with_detection(shifted: Evaluated, own: Evaluated) -> Evaluated:
    """Add the AUROCs of detecting its questions among those of the run's own task."""
    found = {f"shift_auroc_{name}": value for name, value in tell_apart(own.scores, shifted.scores).items()}
    return replace(shifted, result=replace(shifted.result, metrics={**shifted.result.metrics, **found}))


def is_shift(columns: Sequence[Column]) -> bool:
    """Whether a part is on another than the training task."""
    return SHIFT_COLUMNS[-1] in columns


def shift_columns(names: Iterable[str]) -> tuple[Column, ...]:
    """Columns of a part on another task, by the metrics that its runs have."""
    return (*SHIFT_COLUMNS, DISTANCE_COLUMN) if DISTANCE_COLUMN.metric in names else SHIFT_COLUMNS


def _section(found: Mapping[str, Sequence[Evaluated]], columns: tuple[Column, ...]) -> QuestionSection:
    shown = with_calibrated_columns(columns, _metrics_of(found))
    return QuestionSection(shown, table_rows(found, shown), found)


def _metrics_of(found: Mapping[str, Sequence[Evaluated]]) -> set[str]:
    return {name for runs in found.values() for run in runs for name in run.result.metrics}
