"""Execute the missing runs and evaluations of a study, and report progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.models.device import resolve_device
from bayeslora.models.locate import locate
from bayeslora.number_checks import check_count
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import saved_run, to_dict
from bayeslora.studies.evaluated import METRICS
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import Job, StudyJob
from bayeslora.studies.pool import Workers
from bayeslora.studies.worker import RunWorker, config_of
from bayeslora.tasks import OwnFormat, Task, find_task, require_gold
from bayeslora.train.run import open_task

TOLD = (*METRICS, "cot_nll", "cot_ece")
"""Metrics reported for a finished run, if it has them."""


@dataclass
class Runner:
    """Executes missing work; a failure does not affect other work. Processes are reused until the block ends.

    Attributes:
        execution: where and how; with 0 workers nothing is executed and finished results are used.
        failures: reasons of failed runs and evaluations, by label.
    """

    execution: Execution
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("workers", self.execution.workers, least=0)
        self.report, settings = self.execution.report, self.execution.settings
        here = RunWorker(settings, settings.place(self.report))
        self._workers = Workers(settings, self.execution.workers, self.execution.executor, here)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._workers.__exit__(*error)

    def run(self, work: Sequence[StudyJob], what: str = "runs") -> None:
        """Execute the work without a result; directories with other content are refused first."""
        missing = [it for it in work if not _is_done(it)]
        if not work:
            return
        self.report.say(f"{what}: {len(work) - len(missing)} of {len(work)} done already")
        old = [it for it in missing if RunDirectory(it.path).result.exists()]
        if self.execution.workers == 0:
            _require_none(old)
            return
        self._require_possible(missing)
        for it in old:  # if it fails now, the table has a gap
            RunDirectory(it.path).result.unlink()
        ended = 0

        def tell(it: StudyJob, failure: str | None) -> None:
            nonlocal ended
            ended += 1
            if failure is None:
                figures = RunDirectory(it.path).read_result().metrics
                outcome = ", ".join(f"{name} {figures[name]:.4f}" for name in TOLD if name in figures)
            else:
                self.failures[it.label] = failure
                outcome = f"FAILED: {failure}"
            self.report.say(f"[{ended}/{len(missing)}] {it.label}: {outcome}")

        self._workers.run(missing, tell)

    def require_any(self, jobs: Sequence[Job]) -> None:
        """Refuse to show a study that has not begun."""
        if self.execution.workers == 0 and not any(RunDirectory(job.path).result.exists() for job in jobs):
            raise InputError("no run is done, so there is nothing to show; give the command without --workers 0")

    def _require_possible(self, missing: Sequence[StudyJob]) -> None:
        """Refuse a device, a base model or data with which no run can succeed. Nodes of a cluster have their own devices and
        models."""
        if missing and self.execution.executor == "local":
            shared = config_of(missing[0])
            resolve_device(self.execution.device)
            locate(shared.model, shared.loading.revision)
        jobs = [it.config for it in missing if isinstance(it, Job)]
        for config in {it.task: replace(it, report_split="test") for it in jobs}.values():
            open_task(config, self.execution.data_dir)


def require_readable(tasks: Sequence[str], data_dir: Path | None, how: OwnFormat) -> None:
    """Refuse tasks whose test questions cannot be read, or have no answers, before any run."""
    for name in tasks:
        task = find_task(name, data_dir, how)
        if isinstance(task, Task):
            require_gold(task.load("test").items)


def _require_none(old: Sequence[StudyJob]) -> None:
    """Refuse to show results that have to be made again."""
    if old:
        raise InputError(
            f"{old[0].path}: was evaluated before its run was trained or calibrated again; give the command without --workers 0"
        )


def _is_done(work: StudyJob) -> bool:
    """Whether there is a result, of the present state of the run. A directory with other content is refused."""
    place = RunDirectory(work.path)
    if isinstance(work, Job):
        if work.path.exists():
            place.require_free_or_same(to_dict(work.config), replaceable=False)
        return place.result.exists()
    if not place.result.exists():
        return False
    found, run = place.read_result(), RunDirectory(work.run)
    if saved_run(found.config) != saved_run(run.read_config()):
        raise InputError(
            f"{work.path}: holds the evaluation of another run than {work.run}; remove it, or use a new directory"
        )
    if found.task != work.task:
        raise InputError(
            f"{work.path}: holds the evaluation on task {found.task!r}, not on {work.task!r}; remove it, or use a new directory"
        )
    return found.run_state in (None, run.fingerprint())  # earlier versions did not save the state
