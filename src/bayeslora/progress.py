"""Telling people how long work goes: a bar on a terminal, plain lines elsewhere, nothing if nobody listens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Advance = Callable[[int, int], None]
"""Told how much is done, and of how much."""


class Reporter(Protocol):
    """What long work reports to."""

    def stage(self, label: str) -> Advance:
        """Begin a piece of work; the result is called as it goes on."""

    def say(self, text: str) -> None:
        """Tell something in one line."""


class Silent:
    """Tells nothing."""

    def stage(self, label: str) -> Advance:
        """Nothing is told."""
        return lambda done, total: None

    def say(self, text: str) -> None:
        """Nothing is told."""


class PlainLines:
    """A line on stderr for each quarter of a piece of work."""

    def stage(self, label: str) -> Advance:
        """Tells of 0, 25, 50, 75 and 100 %."""
        told = -1

        def advance(done: int, total: int) -> None:
            nonlocal told
            quarter = 4 * done // max(total, 1)
            if quarter > told:
                told = quarter
                self.say(f"{label}: {25 * quarter} %")

        return advance

    def say(self, text: str) -> None:
        """A line on stderr."""
        print(text, file=sys.stderr, flush=True)


@contextmanager
def reporter(*, quiet: bool) -> Iterator[Reporter]:
    """The reporter that fits where stderr goes."""
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
            """One bar per piece of work; a finished one goes away."""

            def stage(self, label: str) -> Advance:
                task = progress.add_task(label, total=None)

                def advance(done: int, total: int) -> None:
                    progress.update(task, completed=done, total=total, visible=done < total)

                return advance

            def say(self, text: str) -> None:
                progress.console.print(text, highlight=False, markup=False)

        yield Bars()
