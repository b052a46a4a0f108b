"""Run a search: trials are planned, logged and executed until there are enough, and the best is chosen.

====================  ==============================================================
``trials.json``       the log: every trial with its settings and outcomes
``trials.md``         the same as a table
``runs/trial-K/``     the run of each trial, on the validation split
``baseline/``         LoRA's run, if a constraint is relative to it
``tuned.json``        the Pareto set, the chosen trial, hypervolumes, versions
``chosen.json``       settings of the chosen run, for ``bayeslora train --config``
``pareto.png``        the front
``chosen/``           the chosen run, trained and evaluated on the test split, if requested
====================  ==============================================================

No trial reads the test split.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.models.device import resolve_device
from bayeslora.number_checks import check_count
from bayeslora.progress import Reporter
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import Job, StudyJob
from bayeslora.studies.pool import Workers
from bayeslora.studies.worker import Outage, RunWorker
from bayeslora.tasks import load_task
from bayeslora.train.errors import RunsFailed
from bayeslora.train.run import train
from bayeslora.tuning.config import Tuning
from bayeslora.tuning.constraints import BASELINE, outcomes_of
from bayeslora.tuning.front import Floats
from bayeslora.tuning.log import BASELINE_RUN, Log, Trial, open_log
from bayeslora.tuning.outcome import SHOWN, Outcome, chosen_run, describe, write_outcome
from bayeslora.tuning.points import sobol
from bayeslora.tuning.space import Space
from bayeslora.wording import counted

_SPARE = 64
"""Candidate points considered to find one that was not tried yet."""


@dataclass(frozen=True)
class Tuned:
    """Result of a search.

    Attributes:
        outcome: the trials, the front, the chosen one.
        text: description to print.
        applied: the result of the chosen run on the test split, if it was trained.
    """

    outcome: Outcome
    text: str
    applied: RunResult | None = None


def tune(
    tuning: Tuning,
    out: Path,
    execution: Execution | None = None,
    *,
    apply: bool = False,
) -> Tuned:
    """Run or resume a search, and choose a trial.

    Args:
        tuning: settings of the search.
        out: output directory.
        execution: where and how the runs execute.
        apply: train the chosen run and evaluate it on the test split.
    """
    execution = execution or Execution()
    if importlib.util.find_spec("botorch") is None:
        raise InputError("tuning needs BoTorch, which is not installed; run: pip install botorch")
    check_count("workers", execution.workers)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose a directory")
    device = resolve_device(execution.device)
    load_task(tuning.run.task, execution.data_dir, tuning.run.data.own_format())
    space = Space(tuning.axes, replace(tuning.run, report_split="validation"))
    open_log(out / "trials.json", to_dict(tuning))  # refuse another search before writing anything
    settings, report = execution.settings, execution.report
    if any(axis.name == "weight_decay" for axis in tuning.axes) and not _decays(tuning.run):
        report.say(f"note: method {tuning.run.method!r} has no point estimates here, so weight_decay changes nothing")
    with RunDirectory(out).locked():
        log = open_log(out / "trials.json", to_dict(tuning))
        here = RunWorker(settings, settings.place(report))
        search = _Search(tuning, space, out, log, here, report)
        with Workers(settings, execution.workers, execution.executor, here) as crew:
            outcome = search.run(crew)
        write_outcome(outcome, space, out, device)
        config, applied = chosen_run(outcome, space), None
        if apply and config is not None:
            report.say("the chosen run, for the test split:")
            chosen = RunDirectory(out / "chosen")  # may differ from an earlier choice if the search was extended
            stale = chosen.config.exists() and chosen.read_config() != to_dict(config)
            applied = search.train(config, chosen.path, force=stale)
    return Tuned(outcome, describe(outcome), applied)


class _Search:
    def __init__(self, tuning: Tuning, space: Space, out: Path, log: Log, here: RunWorker, report: Reporter) -> None:
        self.tuning, self.space, self.out, self.log = tuning, space, out, log
        self.here, self.report = here, report

    def run(self, workers: Workers) -> Outcome:
        baseline = self._baseline()
        while True:
            self._run(self.log.planned, workers)
            outcome = Outcome(self.tuning, tuple(self.log.trials), baseline)
            new = self._next(outcome)
            if not new:
                return outcome
            self.log.plan(new)

    def train(self, config: RunConfig, path: Path, *, force: bool = False) -> RunResult:
        """Train one run in this process, with the base model loaded by its worker."""
        is_done = RunDirectory(path).result.exists() and not force
        return train(config, path, self.here.place if is_done else self.here.prepared(config), force=force)

    def _baseline(self) -> dict[str, float]:
        """Outcomes of LoRA with the fixed settings, at its own learning rate, if a constraint needs them."""
        if not any(limit.relation for limit in self.tuning.limits):
            return {}
        run = self.space.run
        config = replace(
            run,
            method=BASELINE,
            preset=run.preset if run.preset in find_method(BASELINE).presets else "default",
            start_from=(),
            adapter=replace(run.adapter, posterior=None, settings={}, stochastic_layers="all"),
            training=replace(
                run.training, learning_rate=None, rate_multipliers=None, optimiser=None, snapshots=None, members=None
            ),
        )
        self.report.say("LoRA, which constraints are relative to:")
        return outcomes_of(self.train(config, self.out / BASELINE_RUN))

    def _run(self, trials: Sequence[Trial], workers: Workers) -> None:
        """Run trials; a failed one is logged and does not affect others. Machine failures do not count against settings."""
        planned = {trial.path(self.out): trial for trial in trials}
        jobs = [Job(self.space.config(trial.values), path) for path, trial in planned.items()]

        def ended(job: StudyJob, failure: str | None) -> None:
            if isinstance(failure, Outage):
                number = planned[job.path].number
                raise RunsFailed(
                    f"trial {number} could not be run: {failure}; mend that, and give the same command again"
                )
            outcomes = {} if failure else outcomes_of(RunDirectory(job.path).read_result())
            self._note(planned[job.path], outcomes, failure)

        workers.run(jobs, ended)

    def _note(self, trial: Trial, outcomes: Mapping[str, float], failure: str | None) -> None:
        bad = [name for name, value in outcomes.items() if not np.isfinite(value)]
        failure = f"{bad[0]} is {outcomes[bad[0]]}" if bad else failure
        if failure is None:
            self.log.done(trial.number, outcomes)
            told = ", ".join(f"{name} {outcomes[name]:.4f}" for name in SHOWN)
        else:
            self.log.failed(trial.number, failure)
            told = f"FAILED: {failure}"
        settings = ", ".join(f"{name} {value:.4g}" for name, value in trial.values.items())
        self.report.say(f"[{trial.number + 1}/{self.tuning.trials}] {settings}: {told}")

    def _next(self, outcome: Outcome) -> list[Trial]:
        """The trials to run next: first all initial ones, then a batch; empty if the search is complete."""
        number = len(self.log.trials)
        missing = self.tuning.trials - number
        if missing <= 0:
            return []
        if number < self.tuning.first:
            return self._trials(self._sobol(number, self.tuning.first - number), "sobol")
        if outcome.all_failed:
            raise RunsFailed(
                f"all of the first {number} trials failed, trial 0 with {outcome.trials[0].failure}; mend that, and give the "
                "same command again"
            )
        self.report.say(f"choosing the next {min(self.tuning.q, missing)} of {counted(missing, 'trial')}")
        return self._propose(outcome, min(self.tuning.q, missing))

    def _propose(self, outcome: Outcome, count: int) -> list[Trial]:
        from bayeslora.tuning.propose import History, ModelFailed, propose

        x = np.array([self.space.point(trial.values) for trial in outcome.trials])
        history = History(x, outcome.objectives, outcome.violations)
        try:
            points = propose(history, count, self.tuning.feasibility, seed=self.tuning.run.seed + len(x))
        except ModelFailed as error:
            self.report.say(f"{error}; taking evenly spread points instead")
            return self._trials(self._sobol(len(x), count), "sobol")
        return self._trials(points, "model")

    def _sobol(self, first: int, count: int) -> Floats:
        return sobol(len(self.space.axes), first, count, self.tuning.run.seed)

    def _trials(self, points: Floats, source: Literal["sobol", "model"]) -> list[Trial]:
        """Make trials of points. A point whose settings were already tried, as happens with integers, is replaced."""
        number = len(self.log.trials)
        spare = self._sobol(number + len(points), _SPARE)
        tried = [dict(trial.values) for trial in self.log.trials]
        new: list[Trial] = []
        for point in points:
            values = self.space.values(point)
            other = next((it for it in map(self.space.values, (point, *spare)) if it not in tried), None)
            if other is None:
                self.report.say(
                    f"all candidate settings have been tried; the search ends after {counted(number, 'trial')}"
                )
                break
            tried.append(other)
            new.append(Trial(number + len(new), source if other == values else "sobol", other))
        return new


def _decays(run: RunConfig) -> bool:
    """Whether weight decay applies to any parameter of the run."""
    kinds = find_method(run.method).distribution(resolve(run).adapter.posterior).hints.kinds.values()
    return not kinds or run.adapter.stochastic_layers != "all" or any(kind.startswith("weights") for kind in kinds)
