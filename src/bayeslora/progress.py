"""Progress reports: a bar on a terminal, plain lines elsewhere, nothing if quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Advance = Callable[[int, int], None]
"""Progress callback: number of steps done, total number of steps."""


class Reporter(Protocol):
    """Receives progress reports."""

    def stage(self, label: str) -> Advance:
        """Begin a stage of work; returns its progress callback."""

    def say(self, text: str) -> None:
        """Print one line."""


class Silent:
    """Reporter that prints nothing."""

    def stage(self, label: str) -> Advance:
        """Return a callback that does nothing."""
        return lambda done, total: None

    def say(self, text: str) -> None:
        """Do nothing."""


class PlainLines:
    """Reporter that prints a line on stderr for each quarter of a stage."""

    def stage(self, label: str) -> Advance:
        """Return a callback that reports 0, 25, 50, 75 and 100 %."""
        told = -1

        def advance(done: int, total: int) -> None:
            nonlocal told
            quarter = 4 * done // max(total, 1)
            if quarter > told:
                told = quarter
                self.say(f"{label}: {25 * quarter} %")

        return advance

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def reporter(*, quiet: bool) -> Iterator[Reporter]:
    """Yield the reporter that suits stderr: bars on a terminal, else plain lines."""
    if quiet:
        yield Silent()
    elif sys.stderr.isatty():
        with _bars() as bars:
            yield bars
    else:
        yield PlainLines()


@contextmanager
def _bars() -> Iterator[Reporter]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        class Bars:
            """Reporter with one bar per stage; finished bars are removed."""

            def stage(self, label: str) -> Advance:
                task = progress.add_task(label, total=None)

                def advance(done: int, total: int) -> None:
                    progress.update(task, completed=done, total=total, visible=done < total)

                return advance

            def say(self, text: str) -> None:
                progress.console.print(text, highlight=False, markup=False)

        yield Bars()


def default_reporter() -> Reporter:
    """Reporter of calls from Python: lines in a notebook or on a terminal, nothing in scripts whose output goes to a file."""
    return PlainLines() if "ipykernel" in sys.modules or sys.stderr.isatty() else Silent()
