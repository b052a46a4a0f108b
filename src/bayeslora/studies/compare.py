"""Compare methods on tasks under one protocol: train missing runs, and collect all of them in one table.

=========================  ==========================================================
``search/``                runs of the search for learning rates and epochs, on validation questions
``runs/``                  a directory for each run, by task, method, rate and seed
``shift/``                 the same runs evaluated on other tasks
``table.md``, ``.tex``     mean ± standard deviation over the seeds
``table.json``             the same with every run's metrics, settings and versions
``scatter.png``            accuracy against calibration error
``reliability-TASK.png``   reliability diagrams, all seeds together
=========================  ==========================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.figures import reliability_figure, scatter_figure
from bayeslora.figures.table import Column
from bayeslora.methods import find_method
from bayeslora.predict.tokens.predictor import UNCERTAIN
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.comparison import Comparison, read_trial
from bayeslora.studies.evaluated import Places, pooled
from bayeslora.studies.execution import Execution
from bayeslora.studies.layout import finished, make_record, write_study
from bayeslora.studies.plan import Evaluation, plan
from bayeslora.studies.question_sections import QuestionSection, is_shift, question_section, shift_section
from bayeslora.studies.runner import Runner, require_readable
from bayeslora.studies.search import Search, searched_pairs, trials_of
from bayeslora.studies.study import task_name
from bayeslora.studies.tables import ABOUT_SHIFT, ABOUT_TIES, HOW_TO_READ, StudyOutcome, Tables
from bayeslora.studies.token_sections import ANSWER_COLUMNS, PROBLEM_COLUMNS, TEXT_COLUMNS, TokenSection, token_sections
from bayeslora.tasks import Task, TokenTask, find_task
from bayeslora.wording import counted

Wanted = Mapping[tuple[str, str, int], Path]
"""Directories of all runs, by task, method and seed."""


@dataclass
class _Comparison:
    study: Comparison
    out: Path
    runner: Runner

    def run(self) -> StudyOutcome:
        with self.runner:
            search = Search(self.study, self.out, self.runner)
            chosen = search.run()
            jobs = plan(self.study, self.out, chosen)
            self.runner.run(jobs)
            self.runner.require_any(jobs)
            wanted = {(job.config.task, job.config.method, job.config.seed): job.path for job in jobs}
            shifts = self._shifts(wanted)
            self.runner.run([it for shift in shifts.values() for it in shift], "evaluations on other tasks")
        questions: dict[str, QuestionSection] = {}
        tokens: dict[str, TokenSection] = {}
        for task in self.study.tasks:
            title, places = task_name(task), self._done(task, wanted)
            found = self._task(task)
            if isinstance(found, Task):
                questions[title] = question_section(title, places)
            else:
                tokens |= token_sections(title, found, places, self._loras(task, wanted))
        for (task, other), shift in shifts.items():
            title, own = f"{task_name(task)} → {task_name(other)}", self._done(task, wanted)
            places = self._shifted(own, shift)
            found = self._task(other)
            if not isinstance(found, Task):
                tokens |= token_sections(title, found, places, places.get("lora", {}))
            elif isinstance(self._task(task), Task):
                questions[title] = shift_section(title, places, own)
            else:
                questions[title] = question_section(title, places)
        return self._write(questions, tokens, search.record)

    def _task(self, name: str) -> Task | TokenTask[Any]:
        return find_task(name, self.runner.execution.data_dir, self.study.data.own_format())

    def _done(self, task: str, wanted: Wanted) -> Places:
        """All finished runs of a task."""
        return finished(
            {
                method: {seed: wanted[task, method, seed] for seed in self.study.seeds}
                for method in self.study.method_names
            }
        )

    def _loras(self, task: str, wanted: Wanted) -> Mapping[int, Path]:
        """The finished LoRAs of a task by seed, including those trained only for other methods."""
        wished = {seed: wanted[task, "lora", seed] for seed in self.study.seeds if (task, "lora", seed) in wanted}
        return finished({"lora": wished})["lora"]

    def _shifts(self, wanted: Wanted) -> dict[tuple[str, str], list[Evaluation]]:
        """Evaluations of the finished runs of every task on the test splits of the shift tasks."""
        return {
            (task, other): [
                Evaluation(
                    run,
                    other,
                    self.out / "shift" / task_name(task) / task_name(other) / method / f"seed-{seed}",
                    label=f"{task_name(task)} → {task_name(other)}, {method}, seed {seed}",
                )
                for method, runs in self._done(task, wanted).items()
                for seed, run in runs.items()
            ]
            for task in self.study.tasks
            for other in self.study.shift
            if other != task
        }

    def _shifted(self, own: Places, shift: Sequence[Evaluation]) -> Places:
        """The finished evaluations, by method and seed."""
        places = {it.run: it.path for it in shift}
        return finished({method: {seed: places[run] for seed, run in runs.items()} for method, runs in own.items()})

    def _write(
        self, questions: Mapping[str, QuestionSection], tokens: Mapping[str, TokenSection], rates: Mapping[str, Any]
    ) -> StudyOutcome:
        sections: dict[str, QuestionSection | TokenSection] = {**questions, **tokens}
        shown = {
            title: (section.all_rows if isinstance(section, QuestionSection) else section.rows, section.columns)
            for title, section in sections.items()
        }
        tables = Tables(self._head([section.columns for section in sections.values()]), shown, self.runner.failures)
        references = {title: section.references for title, section in questions.items()}
        record = make_record(
            self.study, self.runner.execution.device, sections, self.runner.failures, references=references, **rates
        )
        outcome = write_study(tables, sections, record, self.out)
        points = {title: {name: row for name, row in it.rows.items() if row} for title, it in questions.items()}
        if any(points.values()):
            scatter_figure({title: rows for title, rows in points.items() if rows}, self.out / "scatter.png")
        for title, section in questions.items():
            drawn = {method: pooled(runs) for method, runs in section.found.items() if runs}
            if drawn:
                name = title.replace(" → ", "-to-")
                reliability_figure(drawn, self.out / f"reliability-{name}.png", title=title)
        return outcome

    def _head(self, columns: Sequence[Sequence[Column]]) -> str:
        seeds = len(self.study.seeds)
        samples = self.study.prediction.samples
        head = (
            f"{self.study.model}, {counted(seeds, 'seed')}, {counted(samples, 'weight draw')} where a method draws "
            f"(ensembles: every member once). {HOW_TO_READ}"
        )
        known = {name: read_trial(str(it)) for name, it in self.study.trials.items()}
        if known:
            head += f" Searched before: {', '.join(f'{name} {trial}' for name, trial in known.items())}."
        if len(trials_of(self.study)) > 1 and any(method not in known for _, method in searched_pairs(self.study)):
            head += f" {self._searched('other ' if known else '')}"
        if any(it not in (TEXT_COLUMNS, PROBLEM_COLUMNS, ANSWER_COLUMNS) for it in columns):
            head += f" {ABOUT_TIES}"
        if any(map(is_shift, columns)):
            head += f" {ABOUT_SHIFT}"
        if TEXT_COLUMNS in columns:
            head += (
                f" For text: nats per token; the uncertain tokens are the {UNCERTAIN:.0%} with the highest entropy under the "
                "lora run of the seed."
            )
        return head

    def _searched(self, which: str) -> str:
        """Description of the trials of every method, or of every ``other`` one."""
        factors = ", ".join(f"×{factor:g}" for factor in self.study.rate_factors)
        epochs = ", ".join(map(str, self.study.search_epochs))
        what = f"{factors} with {epochs} epochs" if epochs else factors
        seeds = len(self.study.search_seeds)
        return (
            f"Chosen for every task and {which}trained method by validation NLL (mean of {counted(seeds, 'seed')}) among "
            f"factors of its learning rate: {what}."
        )


def compare(
    study: Comparison,
    out: Path,
    execution: Execution | None = None,
) -> StudyOutcome:
    """Train missing runs, and write tables and figures.

    Args:
        study: settings of the comparison.
        out: output directory.
        execution: where and how the runs execute.
    """
    runner = Runner(execution or Execution())
    for method in study.method_names:
        find_method(method)
    how = study.data.own_format()
    tasks = {name: find_task(name, runner.execution.data_dir, how) for name in (*study.tasks, *study.shift)}
    for name in study.tasks:
        if not isinstance(tasks[name], Task):
            _require_learnable(study.method_names, name)
    require_readable(study.shift, runner.execution.data_dir, how)
    _require_own(out)
    with RunDirectory(out).locked():
        return _Comparison(study, out, runner).run()


def _require_own(out: Path) -> None:
    """Refuse a directory with a table of something else, which would be replaced."""
    record, table = out / "table.json", out / "table.md"
    begun = record.exists() or (out / "runs").exists() or (out / "search").exists()
    if record.exists() and not _is_comparison(record):
        stranger = record
    elif table.exists() and not begun:
        stranger = table
    else:
        return
    raise InputError(f"{out}: its {stranger.name} is not that of a comparison; choose another directory")


def _is_comparison(record: Path) -> bool:
    try:
        return "methods" in json.loads(record.read_text(encoding="utf-8"))["study"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _require_learnable(methods: Sequence[str], task: str) -> None:
    """Refuse methods that need options on tasks without options, before any run."""
    for method in methods:
        if find_method(method).needs_options:
            raise InputError(
                f"method {method!r} is made from questions with options, and task {task_name(task)!r} has none; leave it out"
            )
