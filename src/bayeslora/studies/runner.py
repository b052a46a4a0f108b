"""Making the runs and the evaluations of a study that are missing, and telling how it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.models import LoadedModel
from bayeslora.progress import Reporter, Silent
from bayeslora.studies.evaluated import METRICS
from bayeslora.studies.plan import Job
from bayeslora.studies.pool import Executor, Settings, run_jobs
from bayeslora.tasks import Task, find_task, require_gold
from bayeslora.train.config import from_dict, saved_run, to_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.evaluation import evaluate
from bayeslora.train.run import Place, load_base
from bayeslora.train.trained import load_run

TOLD = (*METRICS, "cot_nll", "cot_ece")
"""What is told of a run that has ended, as far as it has it."""


@dataclass(frozen=True)
class Evaluation:
    """A finished run, to be evaluated on the test split of a task.

    Attributes:
        run: its directory.
        task: any task.
        out: directory of the evaluation.
        label: in a few words.
        samples: weight draws, if not the run's own number.
        posterior_scale: factor of all standard deviations, if not the run's own.
    """

    run: Path
    task: str
    out: Path
    label: str
    samples: int | None = None
    posterior_scale: float | None = None


@dataclass
class Runner:
    """Makes what is missing; something that fails costs nothing else.

    Attributes:
        settings: where runs find things.
        workers: runs side by side, in processes of their own; 0 makes nothing, and goes by what is done.
        executor: where they are: on this machine, or on a Ray cluster.
        report: told how it goes.
        failures: why runs and evaluations failed, by what they were.
    """

    settings: Settings
    workers: int = 1
    executor: Executor = "local"
    report: Reporter = field(default_factory=Silent)
    failures: dict[str, str] = field(default_factory=dict)
    _loaded: LoadedModel | None = None

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InputError(f"workers is {self.workers}; give at least 1, or 0 to go by what is done")

    def run(self, jobs: Sequence[Job], what: str = "runs") -> None:
        """Make the runs that have no result yet; directories that hold others are refused before that."""
        for job in jobs:
            if job.path.exists():
                RunDirectory(job.path).require_free_or_same(to_dict(job.config))
        missing = [job for job in jobs if not RunDirectory(job.path).result.exists()]
        self.report.say(f"{len(jobs)} {what}, {len(jobs) - len(missing)} of them done already")
        if self.workers == 0:
            return
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
        run_jobs(missing, self.settings, tell, workers=self.workers, executor=self.executor, place=place)

    def evaluate(self, evaluations: Sequence[Evaluation]) -> None:
        """Make the evaluations that have no result yet; the base model is loaded once for all."""
        missing = [it for it in evaluations if not _is_done(it)] if self.workers else []
        for number, evaluation in enumerate(missing, 1):
            self.report.say(f"[{number}/{len(missing)}] evaluating {evaluation.label}")
            try:
                self._evaluate(evaluation)
            except InputError:
                raise
            except Exception as error:
                self.failures[evaluation.label] = f"{type(error).__name__}: {error}"
                self.report.say(f"FAILED: {self.failures[evaluation.label]}")

    def _evaluate(self, it: Evaluation) -> None:
        if self._loaded is None:
            config = from_dict(RunDirectory(it.run).read_config())
            self._loaded = load_base(config, self.settings.device)
        trained = load_run(it.run, samples=it.samples, report=self.report, loaded=self._loaded)
        try:
            if it.posterior_scale is not None:
                trained.set_posterior_scale(it.posterior_scale)
            evaluate(trained, it.task, "test", self.settings.data_dir, it.out)
        finally:
            trained.model.unload()


def require_readable(tasks: Sequence[str], data_dir: Path | None) -> None:
    """Refuse tasks whose test questions cannot be read, or have no answers, now rather than when all runs are made."""
    for name in tasks:
        task = find_task(name, data_dir)
        if isinstance(task, Task):
            require_gold(task.load("test").items)


def _is_done(evaluation: Evaluation) -> bool:
    """Whether it has a result. One that is about another run is refused."""
    place = RunDirectory(evaluation.out)
    if not place.result.exists():
        return False
    if saved_run(place.read_result()["config"]) != saved_run(RunDirectory(evaluation.run).read_config()):
        raise InputError(
            f"{evaluation.out}: holds the evaluation of another run than {evaluation.run}; remove it, or use a new directory"
        )
    return True
