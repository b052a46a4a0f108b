"""Report of one ablation, or of all in a directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.figures.curves import draw_curves
from bayeslora.figures.table import Cell, Column, Row
from bayeslora.report.blocks import Block, Drawing, Gallery, Methods, Report, Section
from bayeslora.report.reading import checking, file_names, read_record
from bayeslora.report.settings import environment_section, settings_section
from bayeslora.report.study import (
    INTERVALS,
    Recorded,
    bounds_of,
    failures_section,
    gaps_of,
    make_rows,
    read_all,
    runs_section,
    seeds_of,
)
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablation_plan import Variant, make_variants
from bayeslora.studies.ablations import find_ablation
from bayeslora.studies.evaluated import Places
from bayeslora.studies.question_sections import ABLATION_COLUMNS, PARAMETERS, shift_columns
from bayeslora.studies.study import task_name
from bayeslora.studies.tables import ABOUT_SHIFT, ABOUT_TIES, HOW_TO_READ


def find_ablations(directory: Path) -> list[Path]:
    """Tables of ablations in the output directory of ``ablate``, in that of a task, or in that of one ablation."""
    own = directory / "table.json"
    paths = [own] if own.exists() else sorted([*directory.glob("*/table.json"), *directory.glob("*/*/table.json")])
    return [path for path in paths if "ablation" in read_record(path)]


def ablation_report(directory: Path, paths: Sequence[Path], out: Path) -> Report:
    """Make the report from the tables and the available runs."""
    found = []
    for path in paths:
        with checking(path):
            found.append(_Ablation(path))
    names = file_names(it.title for it in found)
    sections = []
    for it in found:
        with checking(it.path):
            sections += it.sections(names[it.title])
    first = found[0]
    runs = {label: path for it in found for label, path in it.runs.items()}
    gaps = [gap for it in found for gap in it.gaps]
    usual = to_dict(AblationStudy(model="", task=""))
    return Report(
        "ablation" if len(found) == 1 else "ablations",
        first.title if len(found) == 1 else f"{len(found)} ablations of Bayesian-LoRA",
        f"{first.study['model']}; {directory.name}",
        [
            *sections,
            failures_section({what: why for it in found for what, why in it.record["failures"].items()}, gaps),
            runs_section(runs, out),
            settings_section(first.study, usual, ("model", "task")),
            environment_section(first.record["environment"], {}),
        ],
    )


class _Ablation:
    """One ablation.

    Args:
        path: path of its ``table.json``.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, read_record(path)
        self.study: Mapping[str, Any] = self.record["study"]
        self.ablation = find_ablation(self.record["ablation"])
        self.parts: Mapping[str, Recorded] = self.record["sections"]
        self.task = task_name(self.study["task"])
        self.title = f"{self.ablation.name} on {self.task}"
        self.variants = make_variants(self.ablation, self.study["values"] or self.ablation.values)
        unknown = [
            label for part in self.parts.values() for label in part if label not in {it.label for it in self.variants}
        ]
        if unknown:
            raise InputError(
                f"{path}: has the row {unknown[0]!r}, which this version does not know; make the ablation again"
            )

    @property
    def runs(self) -> dict[str, Path]:
        """Paths of the runs by label."""
        return {
            f"{self.title}, {variant.label}, seed {seed}": self._run(variant, seed)
            for variant in self.variants
            for seed in self.record["seeds"]
        }

    @property
    def gaps(self) -> list[str]:
        """Descriptions of missing results."""
        seeds = self.record["seeds"]
        return [gap for part, it in self.parts.items() for gap in gaps_of(f"{self.title}, {part}", it, seeds)]

    def sections(self, name: str) -> list[Section]:
        """One section per part of the table, with the figure in the first."""
        names = file_names(self.parts)
        rows = {part: self._rows(part, recorded) for part, recorded in self.parts.items()}
        sections = []
        for number, (part, recorded) in enumerate(self.parts.items()):
            answered = read_all(part, recorded, self._places(part, recorded))
            told = f"{HOW_TO_READ} {ABOUT_TIES} The best is bold." + (f" {ABOUT_SHIFT}" if part != self.task else "")
            table = Methods(
                f"{name}-{names[part]}",
                rows[part],
                self._columns(part),
                f"{self.ablation.description[:1].upper()}{self.ablation.description[1:]}. {told}"
                + (f" {INTERVALS}" if answered else ""),
                self.ablation.axis,
                bounds_of(answered),
            )
            blocks: list[Block] = [table]
            if number == 0 and any(row for it in rows.values() for row in it.values()):
                blocks.insert(0, Gallery([self._drawing(name, rows)]))
            sections.append(Section(self.title if number == 0 else f"{self.title}: {part}", blocks))
        return sections

    def _drawing(self, name: str, rows: Mapping[str, Mapping[str, Row]]) -> Drawing:
        curves: dict[str, dict[str, dict[str, Row]]] = {}
        for part, labelled in rows.items():
            for variant in self.variants:
                if labelled.get(variant.label):
                    by_method = curves.setdefault(part, {}).setdefault(variant.method, {})
                    by_method[variant.value] = labelled[variant.label]
        ticks = list(dict.fromkeys(variant.value for variant in self.variants))
        own = rows[next(iter(rows))]
        told = ", ".join(f"{label}: {row['nll'].mean:.3f}" for label, row in own.items() if row)
        return Drawing(
            f"{name}-curves",
            draw_curves(curves, axis=self.ablation.axis, ticks=ticks, joined=self.ablation.ordered),
            f"Accuracy, NLL and calibration error against {self.ablation.axis}. Large marks are means, small ones single seeds.",
            f"Accuracy, NLL and calibration error against {self.ablation.axis}; NLL by value: {told}.",
            wide=True,
        )

    def _columns(self, part: str) -> tuple[Column, ...]:
        if part == self.task:
            return (*ABLATION_COLUMNS, PARAMETERS)
        return shift_columns(
            {name for it in self.parts[part].values() for run in it["runs"] for name in run["metrics"]}
        )

    def _rows(self, part: str, recorded: Recorded) -> dict[str, Row]:
        rows = make_rows(recorded, self._columns(part))
        if part != self.task:
            return rows
        sizes = {variant.label: self._size(variant, recorded[variant.label]) for variant in self.variants}
        return {label: {**row, **sizes[label]} if row else row for label, row in rows.items()}

    def _size(self, variant: Variant, record: Mapping[str, Any]) -> Row:
        """Number of trained parameters, taken from the run itself if the record is an evaluation."""
        for run in record["runs"]:
            result = RunDirectory(self._run(variant, int(run["seed"]))).result
            sizes = run.get("parameters") or (read_record(result)["parameters"] if result.exists() else None)
            if sizes:
                return {PARAMETERS.metric: Cell((float(sizes["trainable"]),))}
        return {}

    def _places(self, part: str, recorded: Recorded) -> Places:
        by_label = {variant.label: variant for variant in self.variants}
        other = part.removeprefix(f"{self.task} → ")
        return {
            label: {seed: self._place(by_label[label], other, seed) for seed in seeds}
            for label, seeds in seeds_of(recorded).items()
        }

    def _place(self, variant: Variant, task: str, seed: int) -> Path:
        """Directory of the result: of the run, or of an evaluation of it."""
        if task == self.task and not variant.variation.evaluated:
            return self._run(variant, seed)
        return self.path.parent / "evaluated" / task / variant.name / f"seed-{seed}"

    def _run(self, variant: Variant, seed: int) -> Path:
        name = self.record["variants"][variant.label]["run"]
        return self.path.parent.parent / "runs" / str(name) / f"seed-{seed}"
