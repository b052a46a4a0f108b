"""Tasks by name. A new benchmark is a line here; own data are given as a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bayeslora.errors import InputError, did_you_mean
from bayeslora.tasks import arc, boolq, mmlu, openbookqa, problems, text, winogrande
from bayeslora.tasks.base import Task
from bayeslora.tasks.file import file_task
from bayeslora.tasks.problems import ProblemTask
from bayeslora.tasks.sources import SUFFIXES
from bayeslora.tasks.text import TextTask
from bayeslora.tasks.urns import NAME as URNS
from bayeslora.tasks.urns import urns_task

TokenTask = TextTask | ProblemTask
"""Tasks that predict every token instead of an option."""

TaskFactory = Callable[[Path | None], Task | TokenTask]

TASKS: dict[str, TaskFactory] = {
    **{
        benchmark.name: benchmark.task
        for family in (arc, openbookqa, boolq, winogrande, mmlu)
        for benchmark in family.BENCHMARKS
    },
    URNS: lambda data_dir: urns_task(),
    text.NAME: text.wikitext2_task,
    **{benchmark.name: benchmark.task for benchmark in problems.BENCHMARKS},
}
"""Task factories by name, given a data directory, or ``None`` for the hub. Nothing is read before a split is loaded."""


def find_task(name_or_path: str | Path, data_dir: str | Path | None = None) -> Task | TokenTask:
    """A task of any kind by name, or own data by path (``./boolq`` if a directory has a task's name).

    ``data_dir`` holds local copies of the benchmarks; without it they are read from the hub.
    """
    name = str(name_or_path)
    if name in TASKS:
        return TASKS[name](None if data_dir is None else Path(data_dir))
    path = Path(name).expanduser()
    if name and (_looks_like_path(name) or path.exists()):
        return text.text_task(path) if text.is_text(path) else file_task(path)
    hint = did_you_mean(name, TASKS)
    raise InputError(
        f"unknown task {name!r}{hint}; choose {', '.join(TASKS)}, or pass a file of JSON lines or of plain text"
    )


def load_task(name_or_path: str | Path, data_dir: str | Path | None = None) -> Task:
    """A task of questions with options; others are refused (see :func:`find_task`)."""
    task = find_task(name_or_path, data_dir)
    if not isinstance(task, Task):
        raise InputError(
            f"task {task.name!r} has no questions with options, which are needed here; choose another task"
        )
    return task


def _looks_like_path(name: str) -> bool:
    return name.endswith((*SUFFIXES, *text.SUFFIXES)) or name.startswith((".", "~")) or os.sep in name
