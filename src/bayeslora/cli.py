"""The command line: verbs only, the work is done by the packages they name.

A verb is a dataclass: its fields are the options (tyro reads them) and ``run`` does the job. Exit codes: 0 done, 2 bad
input with one line on stderr, 1 a real failure. Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction
from tyro.extras import SubcommandApp

from bayeslora import __version__
from bayeslora.arguments import one_line, with_config
from bayeslora.errors import InputError
from bayeslora.progress import reporter
from bayeslora.studies.comparison import Comparison
from bayeslora.train.config import RunConfig, flatten, to_dict
from bayeslora.train.errors import RunsFailed, TrainingDiverged

if TYPE_CHECKING:
    from bayeslora.train.trained import TrainedModel

DESCRIPTION = """Fine-tuned language models that know what they do not know.

Start here:
    bayeslora quickstart                                        the whole job in minutes, on any machine
    bayeslora train --model M --task T --out DIR                one run
    bayeslora evaluate DIR --task T                             how good it is
    bayeslora calibrate DIR --error-rate 0.1                    when it should not answer
    bayeslora predict DIR --question Q --choice A --choice B    ask it
    bayeslora compare --model M --tasks T ... --out DIR         all methods in one table
    bayeslora tasks | methods | models                          what there is
    bayeslora VERB --help                                       all options of a verb
    bayeslora --version

A task is a name, or a file of your own questions: JSON lines {"question": ..., "choices": [...], "answer": ...}.

A model is given as the name of a built-in one, a directory in Hugging Face format, or a hub id such as org/model.

Exit codes: 0 done, 1 failure, 2 bad input (one line on stderr says what to do)."""

app = SubcommandApp()


class Verb(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it."""


@dataclass(frozen=True, kw_only=True)
class _Told:
    """How a verb tells what it did."""

    quiet: bool = False
    """Print results and errors only."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class _Place(_Told):
    """Where a verb finds things."""

    data_dir: Path | None = None
    """Local copies of the benchmarks; without it they are read from the hub."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""


@dataclass(frozen=True, kw_only=True)
class Train(_Place):
    """Train one method on one task and report it. The same command goes on with an interrupted run."""

    experiment: OmitArgPrefixes[RunConfig]
    out: Path
    """Directory of the run: settings, adapter, predictions, result. One that holds another run is refused."""
    config: Path | None = None
    """Settings from a JSON file, such as the config.json of another run; options given as well win."""
    report_to: tuple[str, ...] = ()
    """Trackers to tell every step: tensorboard, wandb, mlflow, ..."""
    checkpoint_seconds: float = 60.0
    """The most work that is lost if the run is killed."""
    force: bool = False
    """Replace another run in the directory."""

    def run(self) -> None:
        """Train, with progress on stderr and the metrics on stdout."""
        from bayeslora.train.run import Place, train

        with reporter(quiet=self.quiet) as report:
            place = Place(
                data_dir=self.data_dir,
                device=self.device,
                report_to=self.report_to,
                report=report,
                checkpoint_seconds=self.checkpoint_seconds,
            )
            result = train(self.experiment, self.out, place, force=self.force)
        if self.json:
            print(json.dumps(result))
        else:
            _print_metrics(result["metrics"], result["intervals"])
            print(f"adapter, predictions and result: {self.out}")


@dataclass(frozen=True, kw_only=True)
class _OfRun(_Place):
    """What verbs on a trained run have in common."""

    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory of the run."""
    samples: int | None = None
    """Weight draws whose probabilities are averaged; the run's own number by default, 0 for the posterior mean."""

    @contextlib.contextmanager
    def _loaded(self, *, raw: bool) -> Iterator[TrainedModel]:
        from bayeslora.train.trained import load_run

        if self.samples is not None and self.samples < 0:
            raise InputError(f"samples is {self.samples}; give 0 for the posterior mean, or more")
        with reporter(quiet=self.quiet) as report:
            yield load_run(self.directory, device=self.device, samples=self.samples, raw=raw, report=report)


@dataclass(frozen=True, kw_only=True)
class Evaluate(_OfRun):
    """Metrics of a trained run on any task, the one it was trained on or another."""

    task: str | None = None
    """A task, or the path of your own questions with answers; by default the run's own task."""
    split: Literal["train", "validation", "test"] = "test"
    """Part of the task."""
    raw: bool = False
    """Leave out what calibrate found."""
    out: Path | None = None
    """Directory to write result.json and predictions.jsonl.gz into; nothing is written without it."""
    force: bool = False
    """Replace an evaluation that is there."""

    def run(self) -> None:
        """Evaluate, with the metrics on stdout."""
        from bayeslora.train.evaluation import evaluate, require_free

        if self.out is not None:
            require_free(self.out, force=self.force)
        with self._loaded(raw=self.raw) as trained:
            result = evaluate(trained, self.task, self.split, self.data_dir, self.out)
        if self.json:
            print(json.dumps(result))
        else:
            _print_metrics(result["metrics"], result["intervals"])


@dataclass(frozen=True, kw_only=True)
class Predict(_OfRun):
    """Probabilities over the choices of a question, and whether the model is sure enough to answer."""

    question: str | None = None
    """The question."""
    choice: UseAppendAction[tuple[str, ...]] = ()
    """A choice; give the option once for each."""
    passage: str = ""
    """A text that the question is about."""
    input: Path | None = None
    """A file of JSON lines with questions and choices; prints one JSON line for each."""
    raw: bool = False
    """Leave out what calibrate found."""

    def run(self) -> None:
        """Answer one question in words, or a file of them in JSON lines."""
        from bayeslora.tasks import make_item, read_items

        if (self.question is None) == (self.input is None):
            raise InputError("give either --question with --choice, or --input FILE")
        if self.input is not None and (self.choice or self.passage):
            raise InputError("--choice and --passage belong to --question; with --input they are in the file")
        if self.input is not None:
            items: Sequence[Any] = read_items(self.input).items
        else:
            items = [make_item(self.question or "", self.choice, self.passage)]
        with self._loaded(raw=self.raw) as trained:
            answers = trained.answers(trained.predict(items))
        for item, answer in zip(items, answers, strict=True):
            if self.input is not None or self.json:
                print(json.dumps({"id": item.id, **asdict(answer)}, ensure_ascii=False))
                continue
            for choice, probability in zip(answer.choices, answer.probabilities, strict=True):
                print(f"{probability:6.1%}  {choice}")
            sure = "not sure enough to answer" if answer.abstains else f"answer: {answer.answer}"
            print(f"{sure} (uncertainty {answer.entropy:.2f} nats, of which {answer.epistemic:.2f} from the weights)")


@dataclass(frozen=True, kw_only=True)
class Calibrate(_OfRun):
    """Choose temperature, posterior scale and decision threshold on held-out data, and keep them with the adapter."""

    task: str | None = None
    """A task, or the path of your own questions with answers; by default the run's own task."""
    split: Literal["train", "validation", "test"] = "validation"
    """Part of the task; figures on it are flattering afterwards."""
    error_rate: float | None = None
    """Answer only if at most this share of the answers is wrong."""
    coverage: float | None = None
    """Answer this share of the questions, the surest ones."""
    force: bool = False
    """Replace an earlier calibration."""

    def run(self) -> None:
        """Calibrate, with what was chosen on stdout."""
        from bayeslora.train.directory import RunDirectory

        kept = RunDirectory(self.directory).calibration
        if kept.exists() and not self.force:
            raise InputError(f"{kept}: the run is calibrated already; use --force to do it again")
        with self._loaded(raw=True) as trained:
            found = trained.calibrate(
                self.task, self.split, self.data_dir, error_rate=self.error_rate, coverage=self.coverage
            )
        if self.json:
            print(json.dumps(asdict(found)))
            return
        print(f"posterior scale {found.posterior_scale:g}, temperature {found.temperature:.3f}")
        if found.threshold is not None:
            print(f"answers from confidence {found.threshold:.3f} on, for {found.target}")
        for name in found.before:
            print(f"{name:4}  {found.before[name]:.4f} -> {found.after[name]:.4f}  ({found.task}, {found.split})")


@dataclass(frozen=True, kw_only=True)
class Compare(_Place):
    """Many methods on many tasks under one protocol: one table. The same command makes only the runs that are missing."""

    study: OmitArgPrefixes[Comparison]
    out: Path
    """Directory for the runs, the tables (Markdown, LaTeX, JSON) and the figures."""
    workers: int = 1
    """Runs side by side, each in a process of its own."""

    def run(self) -> None:
        """Run what is missing, with the table on stdout."""
        from bayeslora.studies.compare import compare

        with reporter(quiet=self.quiet) as report:
            compared = compare(
                self.study,
                self.out,
                data_dir=self.data_dir,
                device=self.device,
                workers=self.workers,
                report=report,
            )
        print((self.out / "table.json").read_text(encoding="utf-8") if self.json else compared.text)
        if compared.failures:
            raise RunsFailed(f"{len(compared.failures)} runs failed, the table has gaps; see {self.out / 'table.md'}")


@dataclass(frozen=True, kw_only=True)
class Quickstart(_Told):
    """The whole job on this machine: LoRA and Bayesian-LoRA side by side on SmolLM2, table, figure, adapters."""

    out: Path = Path("bayeslora-quickstart")
    """Directory for the runs and the figure; an interrupted quickstart goes on."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    seed: int = 0
    """Seed of everything random."""
    force: bool = False
    """Do it again from the start."""

    def run(self) -> None:
        """Run both, print the table and what to do next."""
        from bayeslora.studies.quickstart import quickstart

        with reporter(quiet=self.quiet) as report:
            study = quickstart(self.out, device=self.device, seed=self.seed, force=self.force, report=report)
        print(json.dumps(study.results) if self.json else study.text)


@dataclass(frozen=True)
class Methods:
    """List the methods."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each method."""
        from bayeslora.methods import METHODS

        rows = [
            {"name": it.name, "description": it.description, "presets": ", ".join(it.presets)}
            for it in METHODS.values()
        ]
        _print_rows(rows, "{name:{width}}  {description}  [presets: {presets}]", as_json=self.json)


@dataclass(frozen=True)
class Convert:
    """Convert a GGUF file (SmolLM2 or Qwen2.5) into a model directory in Hugging Face format."""

    file: Annotated[Positional[Path], tyro.conf.arg(metavar="FILE.gguf")]
    """The GGUF file."""
    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIRECTORY")]
    """The directory to write. It appears complete or not at all."""
    force: bool = False
    """Replace a directory written by an earlier conversion."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Convert, with progress on stderr and the result on stdout."""
        from bayeslora.models.convert import convert_gguf

        start = time.perf_counter()
        with reporter(quiet=self.quiet) as report:
            convert_gguf(
                self.file, self.directory, force=self.force, progress=report.stage(f"converting {self.file.name}")
            )
        seconds = round(time.perf_counter() - start, 2)
        size = sum(path.stat().st_size for path in self.directory.iterdir())
        if self.json:
            print(json.dumps({"directory": str(self.directory), "bytes": size, "seconds": seconds}))
        elif not self.quiet:
            print(f"{self.directory}: {size / 1e6:.1f} MB written in {seconds} s")


@dataclass(frozen=True)
class Models:
    """List the built-in models, and whether they are installed."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each model."""
        from bayeslora.models.locate import BUILTINS

        rows = [
            {"name": name, "description": it.description, "installed": it.find() is not None, "install": it.install}
            for name, it in BUILTINS.items()
        ]
        if not self.json:
            for row in rows:
                row["state"] = "installed" if row["installed"] else f"not installed; run: {row['install']}"
        _print_rows(rows, "{name:{width}}  {description}  [{state}]", as_json=self.json)


@dataclass(frozen=True)
class Tasks:
    """List the tasks. Own questions are a task too: give the path of a file of JSON lines instead of a name."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each task."""
        from bayeslora.tasks import TASKS

        rows = [{"name": name, "description": make(None).description} for name, make in TASKS.items()]
        _print_rows(rows, "{name:{width}}  {description}", as_json=self.json)


VERBS: dict[str, type[Verb]] = {
    "quickstart": Quickstart,
    "train": Train,
    "evaluate": Evaluate,
    "predict": Predict,
    "calibrate": Calibrate,
    "compare": Compare,
    "tasks": Tasks,
    "methods": Methods,
    "models": Models,
    "convert": Convert,
}

for _name, _verb in VERBS.items():
    app.command(_verb, name=_name)  # type: ignore[call-overload]


def _print_rows(rows: Sequence[Mapping[str, Any]], line: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(line.format(width=width, **row))


def _print_metrics(metrics: Mapping[str, float], intervals: Mapping[str, Mapping[str, float]]) -> None:
    """One line for each metric, with its 95 % interval where there is one."""
    for name, value in metrics.items():
        bounds = intervals.get(name)
        interval = f"  [{bounds['low']:.4f}, {bounds['high']:.4f}]" if bounds else ""
        print(f"{name:17}  {value:.4f}{interval}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a path may not fit the terminal's encoding, nor tyro's bullets
    sys.exit(_run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--version"]:
        print(f"bayeslora {__version__}")
        return 0
    try:
        verb = _parse(with_config(arguments, _settings()) or ["--help"])
        with _hushed() if getattr(verb, "quiet", False) else contextlib.nullcontext():
            verb.run()
    except InputError as error:
        return _complain(error, 2)
    except (OSError, ArithmeticError, TrainingDiverged, RunsFailed) as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    return 0


def _settings() -> list[str]:
    """Names that a file of settings may hold: everything ``train`` can be told but the file itself."""
    own = [field.name for field in fields(Train) if field.name not in ("config", "experiment")]
    return [*flatten(to_dict(RunConfig(model="", task=""))), *own]


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Inside the block libraries print no warnings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _complain(error: object, code: int) -> int:
    print(f"bayeslora: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code


def _parse(arguments: Sequence[str]) -> Verb:
    """The verb with its options. tyro explains a mistake in a box, which is made one line here."""
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            verb: Verb = app.cli(
                prog="bayeslora", description=DESCRIPTION, args=arguments, config=(FlagCreatePairsOff,)
            )
    except SystemExit as end:
        if end.code:
            verb_help = " ".join(["bayeslora", *(word for word in arguments[:1] if word in VERBS), "--help"])
            raise InputError(one_line(complaint.getvalue()).replace("bayeslora --help", verb_help)) from None
        raise
    return verb
