"""Methods on tasks under one protocol: every run that is missing is made, and all of them become one table.

=========================  ==========================================================
``runs/``                  a directory for each run, by task, method, rate and seed
``shift/``                 the same runs evaluated on other tasks
``table.md``, ``.tex``     mean ± standard deviation over the seeds
``table.json``             the same with every run's metrics, settings and versions
``scatter.png``            accuracy against calibration error
``reliability-TASK.png``   reliability diagrams, all seeds together
=========================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bayeslora.errors import InputError
from bayeslora.files import replacing, write_json
from bayeslora.methods import find_method
from bayeslora.models import LoadedModel
from bayeslora.models.device import resolve_device
from bayeslora.predict.token_predictor import UNCERTAIN
from bayeslora.progress import Reporter, Silent
from bayeslora.report import reliability_figure, scatter_figure
from bayeslora.report.table import COLUMNS, DAGGER, Column, Row, latex, markdown
from bayeslora.studies.comparison import Comparison, task_name
from bayeslora.studies.evaluated import (
    METRICS,
    SIGNIFICANT,
    Evaluated,
    load_evaluated,
    pooled,
    require_same_questions,
    summary,
    table_rows,
)
from bayeslora.studies.plan import Chosen, Job, plan, run_path, search_jobs
from bayeslora.studies.pool import Settings, run_jobs
from bayeslora.studies.token_sections import TEXT_COLUMNS, Places, TokenSection, token_sections
from bayeslora.tasks import Task, find_task
from bayeslora.train.config import from_dict, to_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.environment import describe_environment
from bayeslora.train.evaluation import evaluate
from bayeslora.train.run import Place, load_base
from bayeslora.train.trained import load_run

TOLD = (*METRICS, "cot_nll", "cot_ece")
"""What is told of a run that has ended, as far as it has it."""

Wanted = Mapping[tuple[str, str, int], Path]
"""Directories of all runs, by task, method and seed."""


@dataclass
class Compared:
    """What came out.

    Attributes:
        sections: rows of each part of the table, by its title: method to metric to cell.
        text: the whole table in Markdown.
        failures: why runs failed, by what they were.
        out: where everything lies.
    """

    sections: dict[str, dict[str, Row]]
    text: str
    failures: dict[str, str]
    out: Path


@dataclass
class _Study:
    study: Comparison
    out: Path
    settings: Settings
    workers: int
    report: Reporter
    failures: dict[str, str] = field(default_factory=dict)
    loaded: LoadedModel | None = None

    def run(self) -> Compared:
        chosen = self._search()
        jobs = plan(self.study, self.out, chosen)
        self._run(jobs, "runs")
        wanted = {(job.config.task, job.config.method, job.config.seed): job.path for job in jobs}
        sections: dict[str, dict[str, list[Evaluated]]] = {}
        tokens: dict[str, TokenSection] = {}

        def add(title: str, task: str, places: Places, loras: Mapping[int, Path]) -> None:
            found = find_task(task, self.settings.data_dir)
            if isinstance(found, Task):
                sections[title] = _evaluated(title, places)
            else:
                tokens.update(token_sections(title, found, places, loras))

        for task in self.study.tasks:
            loras = {
                seed: path
                for seed in self.study.seeds
                if (path := wanted.get((task, "lora", seed))) is not None and RunDirectory(path).result.exists()
            }
            add(task_name(task), task, self._done(task, wanted), loras)
        for task in self.study.tasks:
            for other in self.study.shift:
                if task_name(other) != task_name(task):
                    places = self._shift(task, other, wanted)
                    add(f"{task_name(task)} → {task_name(other)}", other, places, places.get("lora", {}))
        return self._write(sections, tokens, chosen)

    def _search(self) -> Chosen:
        """The factor of the learning rate for each task and trained method, by validation NLL on the first seed."""
        factors, seed = self.study.rate_factors, self.study.seeds[0]
        jobs = search_jobs(self.study, self.out)
        pairs = list(dict.fromkeys((job.config.task, job.config.method) for job in jobs))
        if len(factors) == 1:
            return dict.fromkeys(pairs, factors[0])
        self._run(jobs, "search runs")
        chosen = {}
        for task, method in pairs:
            found = {f: _validation_nll(run_path(self.out, task, method, f, seed)) for f in factors}
            chosen[task, method] = min(found, key=lambda f: (found[f], abs(np.log(f))))
            told = ", ".join(f"×{f:g}: {nll:.4f}" for f, nll in found.items())
            self.report.say(f"{task_name(task)}, {method}: validation nll {told}; ×{chosen[task, method]:g} it is")
        return chosen

    def _run(self, jobs: Sequence[Job], what: str) -> None:
        for job in jobs:
            if job.path.exists():
                RunDirectory(job.path).require_free_or_same(to_dict(job.config))
        missing = [job for job in jobs if not RunDirectory(job.path).result.exists()]
        self.report.say(f"{len(jobs)} {what}, {len(jobs) - len(missing)} of them done already")
        ended = 0

        def tell(job: Job, failure: str | None) -> None:
            nonlocal ended
            ended += 1
            if failure is None:
                figures = RunDirectory(job.path).read_result()["metrics"]
                outcome = ", ".join(f"{name} {figures[name]:.4f}" for name in TOLD if name in figures)
            else:
                self.failures[job.label] = failure
                outcome = f"FAILED: {failure}"
            self.report.say(f"[{ended}/{len(missing)}] {job.label}: {outcome}")

        place = Place(data_dir=self.settings.data_dir, device=self.settings.device, report=self.report)
        run_jobs(missing, self.settings, tell, workers=self.workers, place=place)

    def _done(self, task: str, wanted: Wanted) -> Places:
        """All finished runs of a task."""
        return {
            method: {
                seed: path
                for seed in self.study.seeds
                if RunDirectory(path := wanted[task, method, seed]).result.exists()
            }
            for method in self.study.method_names
        }

    def _shift(self, task: str, other: str, wanted: Wanted) -> Places:
        """The finished runs of one task, evaluated on the test split of another."""
        found: dict[str, dict[int, Path]] = {}
        for method, runs in self._done(task, wanted).items():
            found[method] = {}
            for seed, run in runs.items():
                place = self.out / "shift" / task_name(task) / task_name(other) / method / f"seed-{seed}"
                if not RunDirectory(place).result.exists():
                    self.report.say(f"{task_name(task)} → {task_name(other)}, {method}, seed {seed}")
                    self._evaluate(run, other, place)
                found[method][seed] = place
        return found

    def _evaluate(self, run: Path, task: str, out: Path) -> None:
        """A run on the test split of any task; the base model is loaded once for all."""
        if self.loaded is None:
            config = from_dict(RunDirectory(run).read_config())
            self.loaded = load_base(config, self.settings.device)
        trained = load_run(run, report=self.report, loaded=self.loaded)
        try:
            evaluate(trained, task, "test", self.settings.data_dir, out)
        finally:
            trained.model.unload()

    def _write(
        self,
        sections: Mapping[str, Mapping[str, Sequence[Evaluated]]],
        tokens: Mapping[str, TokenSection],
        chosen: Chosen,
    ) -> Compared:
        tables = {title: table_rows(found) for title, found in sections.items()}
        shown = {title: (rows, COLUMNS) for title, rows in tables.items()}
        shown |= {title: (section.rows, section.columns) for title, section in tokens.items()}
        text = self._text(shown)
        self.out.mkdir(parents=True, exist_ok=True)
        _write_text(self.out / "table.md", text)
        _write_text(
            self.out / "table.tex", "\n\n".join(f"% {title}\n{latex(*table)}" for title, table in shown.items()) + "\n"
        )
        record = self._record(sections, tables, chosen)
        record["sections"] |= {title: section.record for title, section in tokens.items()}
        write_json(self.out / "table.json", record)
        points = {title: {method: row for method, row in rows.items() if row} for title, rows in tables.items()}
        if any(points.values()):
            scatter_figure({title: rows for title, rows in points.items() if rows}, self.out / "scatter.png")
        for title, found in sections.items():
            drawn = {method: pooled(runs) for method, runs in found.items() if runs}
            if drawn:
                name = title.replace(" → ", "-to-")
                reliability_figure(drawn, self.out / f"reliability-{name}.png", title=title)
        return Compared({title: rows for title, (rows, _) in shown.items()}, text, self.failures, self.out)

    def _text(self, tables: Mapping[str, tuple[Mapping[str, Row], Sequence[Column]]]) -> str:
        seeds = len(self.study.seeds)
        samples = self.study.prediction.samples
        head = (
            f"{self.study.model}, {seeds} seed{'s' if seeds > 1 else ''}, {samples} weight draws where a method draws "
            f"(ensembles: every member once). ACC and ECE in per cent; mean ± standard deviation over seeds; {DAGGER}: the "
            f"paired bootstrap over questions cannot tell it from the best (p ≥ {SIGNIFICANT})."
        )
        if any(columns is TEXT_COLUMNS for _, columns in tables.values()):
            head += (
                f" Of text: nats per token; uncertain are the {UNCERTAIN:.0%} of tokens with the highest entropy under the lora "
                "run of the seed."
            )
        parts = [head, *(f"## {title}\n\n{markdown(*table)}" for title, table in tables.items())]
        if self.failures:
            parts.append("## Failed\n\n" + "\n".join(f"- {what}: {why}" for what, why in self.failures.items()))
        return "\n\n".join(parts) + "\n"

    def _record(
        self,
        sections: Mapping[str, Mapping[str, Sequence[Evaluated]]],
        tables: Mapping[str, Mapping[str, Row]],
        chosen: Chosen,
    ) -> dict[str, Any]:
        """Everything the table was made from, without the predictions."""
        return {
            "schema": 1,
            "study": to_dict(self.study),
            "environment": describe_environment(resolve_device(self.settings.device)),
            "chosen_rate_factors": {f"{task_name(task)}/{method}": factor for (task, method), factor in chosen.items()},
            "sections": {
                title: {
                    method: {
                        "runs": [summary(run) for run in runs],
                        "ties_best": {name: cell.ties_best for name, cell in tables[title][method].items()},
                    }
                    for method, runs in found.items()
                }
                for title, found in sections.items()
            },
            "failures": self.failures,
        }


def compare(
    study: Comparison,
    out: Path,
    *,
    data_dir: Path | None = None,
    device: str = "auto",
    workers: int = 1,
    report: Reporter | None = None,
) -> Compared:
    """Run what is missing, and write tables and figures.

    Args:
        study: what is compared.
        out: directory of everything.
        data_dir: local copies of the benchmarks.
        device: as for :func:`bayeslora.load_model`.
        workers: runs side by side, in processes of their own.
        report: told how it goes.
    """
    if workers < 1:
        raise InputError(f"workers is {workers}; give at least 1")
    for method in study.method_names:
        find_method(method)
    tasks = {name: find_task(name, data_dir) for name in (*study.tasks, *study.shift)}
    for name in study.tasks:
        if not isinstance(tasks[name], Task):
            _require_learnable(study.method_names, name)
    return _Study(study, out, Settings(data_dir, device), workers, report or Silent()).run()


def _evaluated(title: str, places: Places) -> dict[str, list[Evaluated]]:
    """Predictions of questions side by side."""
    found = {
        method: [it for seed, path in runs.items() if (it := load_evaluated(path, seed)) is not None]
        for method, runs in places.items()
    }
    require_same_questions(title, found)
    return found


def _require_learnable(methods: Sequence[str], task: str) -> None:
    """Refuse methods that are made from options where there are none, before anything is run."""
    for method in methods:
        if find_method(method).needs_options:
            raise InputError(
                f"method {method!r} is made from questions with options, and task {task_name(task)!r} has none; leave it out"
            )


def _validation_nll(path: Path) -> float:
    """Of the state that a run has kept; infinite if it failed."""
    directory = RunDirectory(path)
    if not directory.result.exists():
        return float("inf")
    result = directory.read_result()
    seen = [record["validation"]["nll"] for record in result["history"]]
    return float(min(seen) if result["config"]["training"]["patience"] else seen[-1])


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
