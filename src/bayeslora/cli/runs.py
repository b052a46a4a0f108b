"""Verbs that train and evaluate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bayeslora.cli.common import (
    DataOptions,
    OfDraws,
    OtherDataOptions,
    OutputOptions,
    StudyOptions,
    Unnamed,
    print_result,
    quoted,
)
from bayeslora.errors import InputError
from bayeslora.method_names import check_method_names
from bayeslora.progress import Reporter, reporter
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.location import find_directory
from bayeslora.studies.comparison import Comparison
from bayeslora.tasks.registry import TASKS, check_task_names, find_task
from bayeslora.train.errors import RunsFailed
from bayeslora.wording import counted

if TYPE_CHECKING:
    from bayeslora.predict.calibrate import Calibration


@dataclass(frozen=True, kw_only=True)
class Train(DataOptions):
    """Train one method on one task and report it. The same command resumes an interrupted run.

    Examples:
        bayeslora train --model smollm2 --task arc-easy --out run
        bayeslora train --model org/model --task chats.jsonl --epochs 2 --dry-run --out run
        bayeslora train --config run/config.json --seed 1 --out again

    Defaults are those of the method; bayeslora train --method lora --help shows those of another.
    """

    experiment: Unnamed[RunConfig]
    out: Path
    """Directory of the run: settings, adapter, predictions, result. A directory with another run is refused."""
    config: Path | None = None
    """Settings from a JSON or YAML file, such as the config.json of another run; options on the command line take precedence."""
    report_to: tuple[str, ...] = ()
    """Experiment trackers to log every step to: tensorboard, wandb, mlflow, ..."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints: at most this much work is lost if the run is killed."""
    force: bool = False
    """Replace another run in the directory."""
    dry_run: bool = False
    """Only estimate the cost of the run on one device (parameters, memory, steps, time) and show three training examples with
    what is learnt of them. No weights are loaded."""
    tflops: float | None = None
    """Speed that --dry-run assumes, in TFLOP/s that training actually reaches; by default estimated from matrix products on
    this machine. For a run on another machine give its own: about 300 on one H100 in bfloat16."""

    def run(self) -> None:
        """Train, with progress on stderr and the metrics on stdout."""
        if not RunDirectory(self.out).result.exists():  # a finished run needs its data no longer
            check_task_names([self.experiment.task])
        resolve(self.experiment)  # misspelt names are told before the libraries are imported
        if self.dry_run:
            self._estimate()
            return
        from bayeslora.train.processes import Processes
        from bayeslora.train.run import RunContext, train

        with reporter(quiet=self.quiet) as report:
            if Processes.join(self.device).main:
                self._tell_task(report)
            place = RunContext(
                data_dir=self.data_dir,
                device=self.device,
                report_to=self.report_to,
                report=report,
                checkpoint_seconds=self.checkpoint_seconds,
                trust_remote_code=self.trust_remote_code,
            )
            result = train(self.experiment, self.out, place, force=self.force)
        if not Processes.join(self.device).main:
            return
        if self.json:
            print(json.dumps(result, default=dict))
        else:
            print_result(result, quiet=self.quiet)
            print(
                f"adapter, predictions and result: {self.out} (bayeslora report {quoted(self.out)} shows them on a page)"
            )

    def _tell_task(self, report: Reporter) -> None:
        """Say what kind of task own data are taken for, and which of their columns are not used."""
        done = RunDirectory(self.out).result.exists() and not self.force  # needs its data no longer
        if self.experiment.task not in TASKS and not done:
            task = find_task(self.experiment.task, self.data_dir, self.experiment.data.own_format())
            report.say(f"task: {task.description}")

    def _estimate(self) -> None:
        with reporter(quiet=self.quiet) as report:
            self._tell_task(report)
        from bayeslora.train.estimate import estimate

        found = estimate(self.experiment, self.data_dir, device=self.device, tflops=self.tflops)
        print(json.dumps(found.to_dict()) if self.json else found)


@dataclass(frozen=True, kw_only=True)
class Evaluate(OfDraws, OtherDataOptions):
    """Evaluate a trained run on the task it was trained on or on another."""

    task: str | None = None
    """A task, or the path of your own questions with answers or of plain text; by default the run's own task."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the task."""
    raw: bool = False
    """Only report metrics without calibration."""
    reference: Path | None = None
    """For running text: directory of a LoRA's run (or of its evaluation) on the same task and split. The 5 % of tokens with the
    highest entropy there are reported separately. A LoRA is its own reference."""
    out: Path | None = None
    """Directory to write result.json and the predictions into; nothing is written without it."""
    force: bool = False
    """Replace an existing evaluation."""

    def run(self) -> None:
        """Evaluate, with the metrics on stdout."""
        self.require_directory()
        check_task_names([self.task])
        from bayeslora.runs.evaluation import evaluate, require_free

        if self.out is not None:
            require_free(self.out, force=self.force)
        with self.loaded(raw=self.raw) as trained:
            how = self.own_format(trained)
            result = evaluate(trained, self.task, self.split, self.data_dir, self.out, self.reference, how)
        if self.json:
            print(json.dumps(result, default=dict))
        else:
            print_result(result, quiet=self.quiet)


@dataclass(frozen=True, kw_only=True)
class Calibrate(OfDraws, OtherDataOptions):
    """Choose temperature, posterior scale and decision threshold on held-out data, and save them with the adapter."""

    task: str | None = None
    """A task, or the path of your own questions with answers; by default the run's own task."""
    split: Literal["train", "validation", "test"] = "validation"
    """Part of the task; metrics on it are optimistic afterwards."""
    error_rate: float | None = None
    """Set the threshold so that at most this share of the answers is wrong."""
    coverage: float | None = None
    """Set the threshold so that this share of the questions, the most confident ones, is answered."""
    unfamiliar_by: Literal["distance", "entropy", "epistemic", "none"] | None = None
    """Score that decides whether a question is unlike those of training; by default the run's own setting. none measures nothing,
    which saves a pass over every question."""
    unfamiliar_from: float | None = None
    """A question is unfamiliar if this share of the held-out questions has a lower score; by default the run's own setting."""
    tolerance: float | None = None
    """Let draws differ in as few upper layers as cost at most this much NLL; fewer are faster (see --draw-layers)."""
    force: bool = False
    """Replace an earlier calibration. The one from training is always replaced."""

    def run(self) -> None:
        """Calibrate, with the chosen values on stdout."""
        self.require_directory()
        check_task_names([self.task])
        from bayeslora.predict.calibrate import Calibration

        kept = find_directory(self.directory).calibration
        if kept.exists() and not self.force and not Calibration.load(kept).automatic:
            raise InputError(f"{kept}: the run is calibrated already; use --force to do it again")
        with self.loaded(raw=True) as trained:
            found = trained.calibrate(
                self.task,
                self.split,
                self.data_dir,
                error_rate=self.error_rate,
                coverage=self.coverage,
                tolerance=self.tolerance,
                unfamiliar_by=self.unfamiliar_by,
                unfamiliar_from=self.unfamiliar_from,
                how=self.own_format(trained),
            )
        missed = found.threshold is None and (self.error_rate is not None or self.coverage is not None)
        if self.json:
            print(json.dumps(asdict(found)))
        else:
            _print_calibration(found, found.warnings[:-1] if missed else found.warnings)
        if missed:
            raise RunsFailed(
                f"{found.warnings[-1]}; the rest of the calibration is kept in {kept}, and --force replaces it"
            )


def _print_calibration(found: Calibration, warnings: Sequence[str]) -> None:
    layers = "" if found.draw_layers == "all" else f", draws in layers {found.draw_layers}"
    if found.confidence is None:
        print(f"posterior scale {found.posterior_scale:g}, temperature {found.temperature:.3f}{layers}")
    else:
        weights = zip(found.confidence.features, found.confidence.weights, strict=True)
        print("the confidence weighs " + ", ".join(f"{name} {round(weight, 2) + 0.0:+.2f}" for name, weight in weights))
    if found.threshold is not None:
        print(f"answers if the confidence is at least {found.threshold:.3f} (target: {found.target})")
    size = [] if found.questions is None else [counted(found.questions, "question")]
    told = ", ".join([*filter(None, (found.task, found.split)), *size])
    for name in found.before:
        print(f"{name:4}  {found.before[name]:.4f} -> {found.after[name]:.4f}  ({told})")
    for warning in warnings:
        print(f"note: {warning}")


@dataclass(frozen=True, kw_only=True)
class Compare(StudyOptions):
    """Compare many methods on many tasks under one protocol, in one table. The same command trains only missing runs."""

    study: Unnamed[Comparison]
    out: Path
    """Directory for the runs, the tables (Markdown, LaTeX, JSON) and the figures."""

    def run(self) -> None:
        """Run what is missing, with the table on stdout."""
        check_task_names([*self.study.tasks, *self.study.shift])
        if self.study.methods != ("all",):
            check_method_names(self.study.methods)
        from bayeslora.studies.compare import compare

        with reporter(quiet=self.quiet) as report:
            compared = compare(
                self.study,
                self.out,
                self.execution(report),
            )
        print((self.out / "table.json").read_text(encoding="utf-8") if self.json else compared.text)
        if compared.failures:
            raise RunsFailed(
                f"{counted(len(compared.failures), 'run')} failed, the table has gaps; see {self.out / 'table.md'}"
            )


@dataclass(frozen=True, kw_only=True)
class Quickstart(OutputOptions):
    """A complete example on this machine: LoRA and Bayesian-LoRA on SmolLM2, with table, figure and adapters."""

    out: Path = Path("bayeslora-quickstart")
    """Directory for the runs and the figure; an interrupted quickstart resumes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    seed: int = 0
    """Random seed."""
    force: bool = False
    """Start again from scratch."""

    def run(self) -> None:
        """Run both, print the table and what to do next."""
        from bayeslora.studies.quickstart import quickstart

        with reporter(quiet=self.quiet) as report:
            study = quickstart(self.out, device=self.device, seed=self.seed, force=self.force, report=report)
        print(json.dumps(study.results, default=dict) if self.json else study.text)
