"""The command line: verbs only, the work is done by the packages they name.

A verb is a dataclass: its fields are the options (tyro reads them) and ``run`` does the job. Exit codes: 0 done, 2 bad
input with one line on stderr, 1 a real failure. Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import tyro
from tyro.conf import FlagCreatePairsOff, Positional
from tyro.extras import SubcommandApp

from bayeslora import __version__
from bayeslora.errors import InputError

DESCRIPTION = """Fine-tuned language models that know what they do not know.

Start here:
    bayeslora models                          which models are built in
    bayeslora tasks                           which benchmarks there are
    bayeslora convert FILE.gguf DIRECTORY     make a GGUF file a model for every tool
    bayeslora VERB --help                     all options of a verb
    bayeslora --version

A model is given as the name of a built-in one, a directory in Hugging Face format, or a hub id such as org/model.

Exit codes: 0 done, 1 failure, 2 bad input (one line on stderr says what to do)."""

Progress = Callable[[int, int], None]

app = SubcommandApp()


class Verb(Protocol):
    """What the command line runs."""

    def run(self) -> None:
        """Do it."""


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
        with _progress(f"converting {self.file.name}", quiet=self.quiet) as progress:
            convert_gguf(self.file, self.directory, force=self.force, progress=progress)
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
        if self.json:
            print(json.dumps(rows))
            return
        for row in rows:
            state = "installed" if row["installed"] else f"not installed; run: {row['install']}"
            print(f"{row['name']}  {row['description']}  [{state}]")


@dataclass(frozen=True)
class Tasks:
    """List the tasks. Own questions are a task too: give the path of a file of JSON lines instead of a name."""

    json: bool = False
    """Print the list as JSON."""

    def run(self) -> None:
        """One line for each task."""
        from bayeslora.tasks import TASKS

        rows = [{"name": name, "description": make(None).description} for name, make in TASKS.items()]
        if self.json:
            print(json.dumps(rows))
            return
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            print(f"{row['name']:{width}}  {row['description']}")


app.command(Convert, name="convert")  # type: ignore[call-overload]
app.command(Models, name="models")  # type: ignore[call-overload]
app.command(Tasks, name="tasks")  # type: ignore[call-overload]


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
        _parse(arguments or ["--help"]).run()
    except InputError as error:
        return _complain(error, 2)
    except OSError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    return 0


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
            raise InputError(_one_line(complaint.getvalue())) from None
        raise
    return verb


def _one_line(box: str) -> str:
    """The text of a box without its title. A rule across it, of dashes where stdout is not UTF-8, becomes a semicolon."""
    rows = [row.strip("│╭╮╰╯ ") for row in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    text = " ".join(";" if set(row) <= set("─-") else row for row in rows[1:] if row)
    return text.replace(" ;", ";").strip("; ")


@contextlib.contextmanager
def _progress(label: str, *, quiet: bool) -> Iterator[Progress | None]:
    """Tells of long work on stderr: a bar on a terminal, a line for each quarter elsewhere."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label)
            yield lambda done, total: bar.update(task, completed=done, total=total)
    else:
        yield _print_quarters(label)


def _print_quarters(label: str) -> Progress:
    told = -1

    def tell(done: int, total: int) -> None:
        nonlocal told
        quarter = 4 * done // total
        if quarter > told:
            told = quarter
            print(f"{label}: {25 * quarter} %", file=sys.stderr, flush=True)

    return tell
