"""Making the runs and the evaluations of a study that are missing, and telling how it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.config import saved_run, to_dict
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.evaluated import METRICS
from bayeslora.studies.plan import Job, Work
from bayeslora.studies.pool import Executor, Settings, Worker, Workers
from bayeslora.tasks import Task, find_task, require_gold

TOLD = (*METRICS, "cot_nll", "cot_ece")
"""What is told of a run that has ended, as far as it has it."""


@dataclass
class Runner:
    """Makes what is missing; something that fails costs nothing else. Processes stay until the block is left.

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

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise InputError(f"workers is {self.workers}; give at least 1, or 0 to go by what is done")
        here = Worker(self.settings, self.settings.place(self.report))
        self._workers = Workers(self.settings, self.workers, self.executor, here)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._workers.__exit__(*error)

    def run(self, work: Sequence[Work], what: str = "runs") -> None:
        """Do what has no result yet; directories that hold something else are refused before that."""
        missing = [it for it in work if not _is_done(it)]
        if not work:
            return
        self.report.say(f"{len(work)} {what}, {len(work) - len(missing)} of them done already")
        if self.workers == 0:
            return
        ended = 0

        def tell(it: Work, failure: str | None) -> None:
            nonlocal ended
            ended += 1
            if failure is None:
                figures = RunDirectory(it.path).read_result()["metrics"]
                outcome = ", ".join(f"{name} {figures[name]:.4f}" for name in TOLD if name in figures)
            else:
                self.failures[it.label] = failure
                outcome = f"FAILED: {failure}"
            self.report.say(f"[{ended}/{len(missing)}] {it.label}: {outcome}")

        self._workers.run(missing, tell)


def require_readable(tasks: Sequence[str], data_dir: Path | None) -> None:
    """Refuse tasks whose test questions cannot be read, or have no answers, now rather than when all runs are made."""
    for name in tasks:
        task = find_task(name, data_dir)
        if isinstance(task, Task):
            require_gold(task.load("test").items)


def _is_done(work: Work) -> bool:
    """Whether there is a result. A directory that holds something else is refused."""
    place = RunDirectory(work.path)
    if isinstance(work, Job):
        if work.path.exists():
            place.require_free_or_same(to_dict(work.config))
        return place.result.exists()
    if not place.result.exists():
        return False
    if saved_run(place.read_result()["config"]) != saved_run(RunDirectory(work.run).read_config()):
        raise InputError(
            f"{work.path}: holds the evaluation of another run than {work.run}; remove it, or use a new directory"
        )
    return True
