"""Report of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayeslora.figures.scatter import draw_scatter
from bayeslora.figures.table import COLUMNS, Column, Row
from bayeslora.predict.tokens.predictor import UNCERTAIN
from bayeslora.report.blocks import Block, Drawing, Gallery, Methods, Note, Plain, Report, Section
from bayeslora.report.reading import checking, file_names, read_record
from bayeslora.report.settings import environment_section, settings_section
from bayeslora.report.study import (
    INTERVALS,
    Recorded,
    answer_figures,
    bounds_of,
    failures_section,
    gaps_of,
    make_rows,
    read_all,
    runs_section,
    seeds_of,
)
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.comparison import Comparison, Trial
from bayeslora.studies.evaluated import Places, reference_rows, with_calibrated_columns
from bayeslora.studies.plan import run_path
from bayeslora.studies.question_sections import is_shift, shift_columns
from bayeslora.studies.study import task_name
from bayeslora.studies.tables import ABOUT_SHIFT, ABOUT_TIES, HOW_TO_READ
from bayeslora.studies.token_sections import ANSWER_COLUMNS, PROBLEM_COLUMNS, TEXT_COLUMNS
from bayeslora.wording import counted


def comparison_report(directory: Path, out: Path) -> Report:
    """Make the report from ``table.json`` and the available runs."""
    path = directory / "table.json"
    record = read_record(path)
    with checking(path):
        return _Comparison(directory, record).report(out)


class _Comparison:
    def __init__(self, directory: Path, record: Mapping[str, Any]) -> None:
        self.directory, self.record, self.study = directory, record, record["study"]
        self.sections: Mapping[str, Recorded] = record["sections"]
        self.names = file_names(self.sections)
        self.places = {title: self._places(title, it) for title, it in self.sections.items()}

    def report(self, out: Path) -> Report:
        study, seeds = self.study, self.study["seeds"]
        gaps = [gap for title, it in self.sections.items() for gap in gaps_of(title, it, seeds)]
        runs = {
            f"{title}, {method}, seed {seed}": path
            for title, rows in self.places.items()
            for method, some in rows.items()
            for seed, path in some.items()
        }
        methods = list(dict.fromkeys(name for it in self.sections.values() for name in it))
        usual = to_dict(Comparison(model="", tasks=("",)))
        return Report(
            "comparison",
            f"{counted(len(methods), 'method')} on {', '.join(map(task_name, study['tasks']))}",
            f"{study['model']}, {counted(len(seeds), 'seed')}",
            [
                *(self._section(title, recorded) for title, recorded in self.sections.items()),
                self._rates(),
                failures_section(self.record["failures"], gaps),
                self._runs(),
                runs_section(runs, out),
                settings_section(study, usual, ("model", "tasks")),
                environment_section(self.record["environment"], {}),
            ],
        )

    def _section(self, title: str, recorded: Recorded) -> Section:
        columns, name = columns_of(recorded), self.names[title]
        rows = make_rows(recorded, columns)
        references = reference_rows(self.record.get("references", {}).get(title, {}))
        answered = read_all(title, recorded, self.places[title])
        told = _how_to_read(columns) + (f" {INTERVALS}" if answered else "")
        shown = {**rows, **references}
        blocks: list[Block] = [Methods(name, shown, columns, told, bounds=bounds_of(answered))]
        drawings = [] if columns in (TEXT_COLUMNS, PROBLEM_COLUMNS) else _scatter(name, title, rows)
        if answered:
            drawings += answer_figures(name, answered)
        if drawings:
            blocks.append(Gallery(drawings))
        if not answered and drawings and columns != ANSWER_COLUMNS:
            blocks.append(Note("The runs' predictions are not here, so there are no reliability diagrams."))
        return Section(title, blocks)

    def _places(self, title: str, recorded: Recorded) -> Places:
        """Directories of the runs of a part of the table."""
        seeds = seeds_of(recorded)
        for task in self.study["tasks"]:
            name = task_name(task)
            if title in _titles(name):
                return {
                    method: {
                        seed: run_path(self.directory, task, method, self._trial(name, method), seed) for seed in some
                    }
                    for method, some in seeds.items()
                }
            for other in map(task_name, self.study["shift"]):
                if title in _titles(f"{name} → {other}"):
                    place = self.directory / "shift" / name / other
                    return {
                        method: {seed: place / method / f"seed-{seed}" for seed in some}
                        for method, some in seeds.items()
                    }
        return {}

    def _trial(self, task: str, method: str) -> Trial:
        """The trial of a method; a method that builds on LoRAs is stored with their trial."""
        factors, epochs = self.record["chosen_rate_factors"], self.record.get("chosen_epochs", {})
        name = f"{task}/{method}" if f"{task}/{method}" in factors else f"{task}/lora"
        return Trial(float(factors.get(name, 1.0)), epochs.get(name))

    def _rates(self) -> Section:
        searched = self.record.get("rate_search", {})
        if not searched:
            return Section("Learning rates", [])
        tried = list(dict.fromkeys(label for nlls in searched.values() for label in nlls))
        tried.sort(key=_in_order)

        def shown(what: str, label: str) -> str:
            nll = searched[what].get(label)
            return "—" if nll is None else f"{nll:.4f}"

        rows = [
            [what, *(shown(what, label) for label in tried), str(self._trial(*what.rsplit("/", 1)))]
            for what in searched
        ]
        head = ["task / method", *(f"×{label}" for label in tried), "chosen"]
        seeds = self.study.get("search_seeds", (0,))
        caption = (
            f"Validation NLL by factor of the learning rate{', and epochs,' if 'chosen_epochs' in self.record else ''} (mean of "
            f"{counted(len(seeds), 'seed')}), and what was chosen; — where it was not tried, or a run failed."
        )
        return Section("Learning rates", [Plain("rates", head, rows, caption, frozenset(range(1, len(head))))])

    def _runs(self) -> Section:
        rows = []
        for title, recorded in self.sections.items():
            for method, record in recorded.items():
                rows += [[title, method, *_run(run)] for run in record["runs"]]
        head = ["", "method", "seed", "ACC", "NLL", "ECE", "train", "predict"]
        caption = "Every run; ACC and ECE in per cent, times in seconds."
        if any(columns_of(recorded) == PROBLEM_COLUMNS for recorded in self.sections.values()):
            caption += " For problems, NLL and ECE are those of the tokens of their solutions."
        return Section("Single runs", [Plain("runs", head, rows, caption, frozenset(range(2, 8)))] if rows else [])


def columns_of(recorded: Recorded) -> tuple[Column, ...]:
    """Columns to show, by the metrics that the runs have."""
    names = {name for record in recorded.values() for run in record["runs"] for name in run["metrics"]}
    if "cot_nll" in names:
        return PROBLEM_COLUMNS
    if "f1" in names:
        return ANSWER_COLUMNS
    if "shift_auroc_entropy" in names:
        return with_calibrated_columns(shift_columns(names), names)
    return with_calibrated_columns(COLUMNS, names) if "adaptive_ece" in names or not names else TEXT_COLUMNS


def _in_order(label: str) -> tuple[float, float]:
    """Sort key of trials: by epochs, then by factor."""
    factor, _, epochs = label.partition(", epochs ")
    return float(epochs or 0), float(factor)


def _titles(title: str) -> tuple[str, ...]:
    """Titles of the parts of the table for one task: texts have one per split."""
    return title, f"{title}, validation", f"{title}, test"


def _how_to_read(columns: tuple[Column, ...]) -> str:
    if columns == TEXT_COLUMNS:
        return (
            f"Mean ± standard deviation over seeds, nats per token, ECE in per cent; the uncertain tokens are the "
            f"{UNCERTAIN:.0%} with the highest entropy under the LoRA of the seed. The best is bold."
        )
    if columns in (PROBLEM_COLUMNS, ANSWER_COLUMNS):
        return f"{HOW_TO_READ} The best is bold."
    told = f"{HOW_TO_READ} {ABOUT_TIES} The best is bold."
    return f"{told} {ABOUT_SHIFT}" if is_shift(columns) else told


def _scatter(name: str, title: str, rows: Mapping[str, Row]) -> list[Drawing]:
    points = {method: row for method, row in rows.items() if "acc" in row and "ece" in row}
    if not points:
        return []
    told = ", ".join(
        f"{it} {100 * row['acc'].mean:.1f} % / {100 * row['ece'].mean:.1f} %" for it, row in points.items()
    )
    return [
        Drawing(
            f"scatter-{name}",
            draw_scatter({title: points}),
            "Accuracy against calibration error: up and left is better. Bars are standard deviations over seeds.",
            f"Accuracy and calibration error: {told}.",
        )
    ]


def _run(run: Mapping[str, Any]) -> list[str]:
    figures, timing = run["metrics"], run.get("timing", {})

    def shown(name: str, factor: float, digits: int) -> str:
        value = figures.get(name, figures.get(f"cot_{name}"))
        return "—" if value is None else f"{factor * value:.{digits}f}"

    times = (f"{timing[name]:.1f}" if name in timing else "—" for name in ("train_seconds", "predict_seconds"))
    return [str(run["seed"]), shown("acc", 100, 1), shown("nll", 1, 3), shown("ece", 100, 1), *times]
