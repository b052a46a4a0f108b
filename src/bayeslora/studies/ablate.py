"""Ablate one setting of Bayesian-LoRA: train missing runs, and collect all of them in a table and a figure.

==============================  ==================================================================
``TASK/runs/``                  a directory for each run, by name and seed; shared by all ablations
``TASK/ABLATION/evaluated/``    runs evaluated with other draws or scales, or on other tasks
``TASK/ABLATION/table.md``      mean ± standard deviation over the seeds; also as ``.tex``
``TASK/ABLATION/table.json``    the same with every run's metrics, settings and versions
``TASK/ABLATION/figure.png``    accuracy, NLL and calibration error against the value
==============================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.figures.curves import Curves, curves_figure
from bayeslora.figures.table import Cell, Row
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablation_plan import Jobs, Variant, make_variants, plan_jobs
from bayeslora.studies.ablations import ABLATIONS, Ablation, find_ablation
from bayeslora.studies.evaluated import Places
from bayeslora.studies.execution import Execution
from bayeslora.studies.layout import finished, make_record, write_study
from bayeslora.studies.plan import Evaluation, StudyJob
from bayeslora.studies.question_sections import (
    ABLATION_COLUMNS,
    PARAMETERS,
    QuestionSection,
    question_section,
    shift_section,
)
from bayeslora.studies.runner import Runner, require_readable
from bayeslora.studies.study import require_distinct, task_name
from bayeslora.studies.tables import ABOUT_SHIFT, ABOUT_TIES, HOW_TO_READ, StudyOutcome, Tables
from bayeslora.tasks import load_task
from bayeslora.wording import counted


@dataclass
class _Ablation:
    ablation: Ablation
    study: AblationStudy
    variants: Sequence[Variant]
    jobs: Jobs
    seeds: Sequence[int]
    out: Path
    runner: Runner

    def evaluations(self) -> list[Evaluation]:
        """Evaluations to do once the runs are finished."""
        return [
            Evaluation(
                self.jobs[variant.label, seed].path,
                task,
                self._place(task, variant, seed),
                label=f"{task_name(task)}, {variant.name}, seed {seed}",
                samples=variant.variation.samples,
                posterior_scale=variant.variation.posterior_scale,
            )
            for task in (self.study.task, *self.study.shift)
            for variant in self.variants
            for seed in self.seeds
            if self._is_done(variant, seed) and not self._is_run(task, variant)
        ]

    def _is_done(self, variant: Variant, seed: int) -> bool:
        """Whether the run is finished."""
        return RunDirectory(self.jobs[variant.label, seed].path).result.exists()

    def _is_run(self, task: str, variant: Variant) -> bool:
        """Whether the result on a task is that of the run itself."""
        return task == self.study.task and not variant.variation.evaluated

    def _place(self, task: str, variant: Variant, seed: int) -> Path:
        """Directory of the result on a task."""
        if self._is_run(task, variant):
            return self.jobs[variant.label, seed].path
        return self.out / "evaluated" / task_name(task) / variant.name / f"seed-{seed}"

    def report(self) -> StudyOutcome:
        """Write table and figure of the finished results."""
        own = self._places(self.study.task)
        title = task_name(self.study.task)
        sections = {title: self._own_section(title, own)}
        for other in self.study.shift:
            shifted = f"{title} → {task_name(other)}"
            sections[shifted] = shift_section(shifted, self._places(other), own)
        return self._write(sections)

    def _places(self, task: str) -> Places:
        """Finished results on a task, by row and seed."""
        return finished(
            {
                variant.label: {
                    seed: self._place(task, variant, seed) for seed in self.seeds if self._is_done(variant, seed)
                }
                for variant in self.variants
            }
        )

    @property
    def _failures(self) -> dict[str, str]:
        """Failures of its own runs and evaluations."""
        work: list[StudyJob] = [*self.jobs.values(), *self.evaluations()]
        own = {it.label for it in work}
        return {label: why for label, why in self.runner.failures.items() if label in own}

    def _own_section(self, title: str, places: Places) -> QuestionSection:
        """Results on the training task, with the sizes of the adapters."""
        section = question_section(title, places, ABLATION_COLUMNS)
        rows = {label: {**row, **self._size(label)} if row else row for label, row in section.rows.items()}
        return QuestionSection((*section.columns, PARAMETERS), rows, section.found)

    def _size(self, label: str) -> Row:
        paths = (RunDirectory(self.jobs[label, seed].path) for seed in self.seeds)
        result = next(path.read_result() for path in paths if path.result.exists())
        return {PARAMETERS.metric: Cell(((result.parameters or {})["trainable"],))}

    def _write(self, sections: Mapping[str, QuestionSection]) -> StudyOutcome:
        shown = {title: (section.rows, section.columns) for title, section in sections.items()}
        tables = Tables(self._head(), shown, self._failures, self.ablation.axis)
        record = make_record(
            self.study,
            self.runner.execution.device,
            sections,
            self._failures,
            ablation=self.ablation.name,
            seeds=list(self.seeds),
            variants={variant.label: self._meaning(variant) for variant in self.variants},
        )
        outcome = write_study(tables, sections, record, self.out)
        curves = {title: self._curves(section.rows) for title, section in sections.items()}
        if any(curves.values()):
            curves_figure(
                {title: it for title, it in curves.items() if it},
                self.out / "figure.png",
                axis=self.ablation.axis,
                ticks=list(dict.fromkeys(variant.value for variant in self.variants)),
                joined=self.ablation.ordered,
            )
        return outcome

    def _curves(self, rows: Mapping[str, Row]) -> Curves:
        """Rows with results, by method and value."""
        found: dict[str, dict[str, Row]] = {}
        for variant in self.variants:
            if rows[variant.label]:
                found.setdefault(variant.method, {})[variant.value] = rows[variant.label]
        return found

    def _head(self) -> str:
        samples = (
            "" if self.ablation.name == "samples" else f", {counted(self.study.prediction.samples, 'weight draw')}"
        )
        head = (
            f"Ablation {self.ablation.name}: {self.ablation.description}.\n\n"
            f"{self.study.model}, learnt on {task_name(self.study.task)}, "
            f"{counted(len(self.seeds), 'seed')}{samples}. {HOW_TO_READ} {ABOUT_TIES} Epistemic: mean uncertainty in the "
            "weights, in nats. Parameters: those that are trained."
        )
        return f"{head} {ABOUT_SHIFT}" if self.study.shift else head

    def _meaning(self, variant: Variant) -> dict[str, Any]:
        """Full settings of a row's run for the first seed, and of its evaluation if that is varied."""
        job = self.jobs[variant.label, self.seeds[0]]
        how = {"samples": variant.variation.samples, "posterior_scale": variant.variation.posterior_scale}
        return {
            "config": to_dict(job.config),
            "run": job.name,
            "evaluated_with": {name: value for name, value in how.items() if value is not None},
        }


def ablate(
    names: Sequence[str],
    study: AblationStudy,
    out: Path,
    execution: Execution | None = None,
) -> list[StudyOutcome]:
    """Train missing runs of some ablations, and write a table and a figure for each.

    Args:
        names: names in :data:`bayeslora.studies.ablations.ABLATIONS`.
        study: common settings of all runs.
        out: directory for these and other ablations, which share runs.
        execution: where and how the runs execute.
    """
    require_distinct("the command", names)
    ablations = [find_ablation(name) for name in names]
    if not ablations:
        raise InputError(f"no ablation is named; choose {', '.join(ABLATIONS)}, or all")
    if study.values and len(ablations) > 1:
        raise InputError(f"values is {' '.join(study.values)} and ablations are {' '.join(names)}; give values for one")
    runner = Runner(execution or Execution())
    place = out / task_name(study.task)
    studies = [_study(ablation, study, place, runner) for ablation in ablations]
    for task in (study.task, *study.shift):
        load_task(task, runner.execution.data_dir, study.data.own_format())
    require_readable((study.task, *study.shift), runner.execution.data_dir, study.data.own_format())
    with RunDirectory(place).locked():
        with runner:
            jobs = list({job.path: job for it in studies for job in it.jobs.values()}.values())
            runner.run(jobs)
            runner.require_any(jobs)
            runner.run([evaluation for it in studies for evaluation in it.evaluations()], "evaluations")
        return [it.report() for it in studies]


def _study(ablation: Ablation, study: AblationStudy, place: Path, runner: Runner) -> _Ablation:
    variants = make_variants(ablation, study.values or ablation.values)
    seeds = study.seeds or ablation.seeds
    jobs = plan_jobs(study, variants, seeds, place / "runs")
    return _Ablation(ablation, study, variants, jobs, seeds, place / ablation.name, runner)
