"""Options shared by verbs, and helpers that print results."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from bayeslora.progress import Reporter, reporter
from bayeslora.runs.config import Pairs, check_samples
from bayeslora.runs.location import find_directory, require_directory
from bayeslora.runs.result import RunResult
from bayeslora.server.announcement import Served
from bayeslora.wording import counted

if TYPE_CHECKING:
    from bayeslora.runs.trained import TrainedModel
    from bayeslora.studies.execution import Execution
    from bayeslora.tasks import OwnFormat


T = TypeVar("T")
Unnamed = Annotated[OmitArgPrefixes[T], tyro.conf.arg(name="")]
"""Options of a group whose name is neither part of theirs nor shown in the help."""


class Verb(Protocol):
    """A command of the command line."""

    def run(self) -> None:
        """Run the command."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Output options of a verb."""

    quiet: bool = False
    """Print results and errors only."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(OutputOptions):
    """Device options of a verb."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    trust_remote_code: bool = False
    """Run code from the base model's repository. It must be given on every command and is never saved."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(DeviceOptions):
    """Data options of a verb."""

    data_dir: Path | None = None
    """Local copies of the benchmarks; without it they are read from the hub."""


@dataclass(frozen=True, kw_only=True)
class OtherDataOptions(DataOptions):
    """Data options of verbs that use a trained run on its own data or on others."""

    columns: Annotated[Mapping[str, str] | None, Pairs] = None
    """What the data call the fields that tasks have, such as question=query; by default as in training."""

    def own_format(self, trained: TrainedModel) -> OwnFormat | None:
        """The format of the data, or ``None`` if it is that of training."""
        return None if self.columns is None else replace(trained.config.data, columns=self.columns).own_format()


@dataclass(frozen=True, kw_only=True)
class StudyOptions(DataOptions):
    """Options of verbs that train many runs."""

    workers: int = 1
    """Number of runs in parallel, each in its own process. With 0, compare and ablate start none and show the finished ones."""
    executor: Literal["local", "ray"] = "local"
    """Where runs execute: on this machine, or on the Ray cluster at RAY_ADDRESS, whose nodes must share this directory."""

    def execution(self, report: Reporter) -> Execution:
        """These options for the study itself."""
        from bayeslora.studies.execution import Execution

        return Execution(
            data_dir=self.data_dir,
            device=self.device,
            workers=self.workers,
            executor=self.executor,
            trust_remote_code=self.trust_remote_code,
            report=report,
        )


@dataclass(frozen=True, kw_only=True)
class OfRun(DeviceOptions):
    """Options of verbs that use a trained run."""

    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory of a run, or of an adapter that PEFT or TRL has saved, or the id of one on the hub."""
    model: str | None = None
    """Base model of an adapter that does not name it, or whose base model lies elsewhere."""

    def require_directory(self) -> None:
        """Refuse a directory without a run or an adapter, before the libraries are imported that load one."""
        require_directory(self.directory)
        if not self.directory.expanduser().exists():
            find_directory(self.directory)


@dataclass(frozen=True, kw_only=True)
class OfDraws(OfRun):
    """Options of verbs that predict."""

    samples: int | None = None
    """Weight draws whose probabilities are averaged; the run's own number by default, 0 for the posterior mean."""
    draw_layers: str | None = None
    """Layers in which draws differ: all, last:K or a fraction. The others are computed once for all draws, at the mean."""

    def served(self, *, raw: bool) -> Served:
        """What answers with these options depend on, in the present state of the run."""
        return Served.of(
            find_directory(self.directory),
            self.model,
            raw=raw,
            draw_layers=self.draw_layers,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
        )

    @contextlib.contextmanager
    def loaded(self, *, raw: bool) -> Iterator[TrainedModel]:
        """Load the run with its model, with progress on stderr."""
        if self.samples is not None:
            check_samples(self.samples)  # before anything is loaded
        self.require_directory()
        from bayeslora.runs.load import load_run

        with reporter(quiet=self.quiet) as report:
            yield load_run(
                self.directory,
                device=self.device,
                samples=self.samples,
                draw_layers=self.draw_layers,
                raw=raw,
                report=report,
                trust_remote_code=self.trust_remote_code,
                model=self.model,
            )


def quoted(path: Path) -> str:
    """A path as a shell takes it, for commands that are told to the user."""
    return shlex.quote(str(path))


def print_rows(rows: Sequence[Mapping[str, Any]], line: str, *, as_json: bool) -> None:
    """Print one line per row, with names padded to the longest."""
    if as_json:
        print(json.dumps(rows))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(line.format(width=width, **row))


def print_result(result: RunResult, *, quiet: bool = False) -> None:
    """Print one line per metric with its 95 % interval if there is one, and the calibrated value if there is one; then how sure
    the model says it is, in words. Unless ``quiet``, first say what the metrics are of."""
    shown: list[Mapping[str, Any]] = [result] if result.calibrated is None else [result, result.calibrated]
    if not quiet:
        print(_about(result))
    if result.calibrated is not None:
        print(f"{'':17}  {'as trained':{_WIDTH}}  calibrated")
    for name in result.metrics:
        cells = [_cell(part["metrics"][name], part["intervals"].get(name)) for part in shown]
        print(f"{name:17}  " + "  ".join(f"{cell:{_WIDTH}}" for cell in cells).rstrip())
    if {"acc", "confidence"} <= shown[-1]["metrics"].keys():
        from bayeslora.report.wording import in_words

        tokens = result.tokens is not None and result.solutions is None
        print(in_words(shown[-1]["metrics"], "next tokens" if tokens else "answers"))
    if result.shift is not None:
        told = ", ".join(f"{score} {value:.4f}" for score, value in result.shift.items())
        print(f"AUROC of telling these questions from the run's own: {told}")


def _about(result: RunResult) -> str:
    """The split and its size, and what brackets mean if there are some."""
    counts = result.counts.get(result.split, {})
    sizes = [counted(counts[f"{noun}s"], noun) for noun in ("question", "text", "token") if f"{noun}s" in counts]
    if result.solutions is not None:
        sizes.append(counted(result.solutions, "written answer"))
    brackets = "; in brackets: 95 % intervals" if result.intervals else ""
    return f"{', '.join([f'{result.split} split', *sizes])}{brackets}"


_WIDTH = len("0.0000  [0.0000, 0.0000]")


def _cell(value: float, bounds: Mapping[str, float] | None) -> str:
    return f"{value:.4f}" + (f"  [{bounds['low']:.4f}, {bounds['high']:.4f}]" if bounds else "")
