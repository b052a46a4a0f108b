"""Parts of a comparison's table for tasks that predict every token: running text, and problems with solutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayeslora.figures.table import Cell, Column, Row
from bayeslora.predict.tokens.predictor import read_token_predictions
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.studies.evaluated import Places, summary_of
from bayeslora.tasks import AnswerTask, ProblemTask, TokenTask

TEXT_COLUMNS = (
    Column("nll", "NLL ↓"),
    Column("brier", "Brier ↓"),
    Column("ece", "ECE ↓", 100.0, 2),
    Column("uncertain_nll", "NLL, uncertain ↓"),
    Column("uncertain_brier", "Brier, uncertain ↓"),
    Column("uncertain_ece", "ECE, uncertain ↓", 100.0, 2),
)
PROBLEM_COLUMNS = (
    Column("acc", "ACC ↑", 100.0, 1, largest=True),
    Column("cot_nll", "CoT-NLL ↓"),
    Column("cot_ece", "CoT-ECE ↓", 100.0, 2),
)
ANSWER_COLUMNS = (
    Column("acc", "ACC ↑", 100.0, 1, largest=True),
    Column("f1", "F1 ↑", 100.0, 1, largest=True),
    Column("nll", "NLL ↓"),
    Column("ece", "ECE ↓", 100.0, 2),
    Column("auroc", "AUROC ↑", largest=True),
    Column("aurc", "AURC ↓"),
)


@dataclass(frozen=True)
class TokenSection:
    """A part of the table.

    Attributes:
        columns: columns to show.
        rows: rows by method.
        record: data of the rows, by method.
    """

    columns: tuple[Column, ...]
    rows: dict[str, Row]
    record: dict[str, Any]


def token_sections(
    title: str, task: TokenTask[Any], places: Places, loras: Mapping[int, Path]
) -> dict[str, TokenSection]:
    """Parts by title: one for problems or free answers, and for text one for each split that the results have.

    Args:
        title: common title.
        task: the predicted task.
        places: directories of the results.
        loras: results of LoRAs by seed, whose entropies determine the uncertain tokens.
    """
    if isinstance(task, (ProblemTask, AnswerTask)):
        figures = {
            method: {seed: _result(path).metrics for seed, path in runs.items()} for method, runs in places.items()
        }
        return {title: _section(ANSWER_COLUMNS if isinstance(task, AnswerTask) else PROBLEM_COLUMNS, figures, places)}
    sections = {}
    for split in ("validation", "test"):
        figures = {
            method: {
                seed: _text_metrics(path, split, loras.get(seed))
                for seed, path in runs.items()
                if RunDirectory(path).tokens(split).exists()
            }
            for method, runs in places.items()
        }
        if any(figures.values()):
            sections[f"{title}, {split}"] = _section(TEXT_COLUMNS, figures, places)
    return sections


def _text_metrics(path: Path, split: str, lora: Path | None) -> dict[str, float]:
    predictions = read_token_predictions(RunDirectory(path).tokens(split))
    if lora is not None:
        reference = read_token_predictions(RunDirectory(lora).tokens(split))
        predictions = predictions.with_reference(reference, str(lora))
    return predictions.metrics()


def _section(
    columns: tuple[Column, ...], figures: Mapping[str, Mapping[int, Mapping[str, float]]], places: Places
) -> TokenSection:
    rows: dict[str, Row] = {
        method: {
            column.metric: Cell(tuple(it[column.metric] for it in runs.values()))
            for column in columns
            if runs and all(column.metric in it for it in runs.values())
        }
        for method, runs in figures.items()
    }
    record = {
        method: {
            "runs": [
                {**summary_of(_result(places[method][seed]), seed), "metrics": dict(it)} for seed, it in runs.items()
            ]
        }
        for method, runs in figures.items()
    }
    return TokenSection(columns, rows, record)


def _result(path: Path) -> RunResult:
    return RunDirectory(path).read_result()
