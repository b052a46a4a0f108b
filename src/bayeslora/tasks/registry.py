"""Tasks by name. A new benchmark is a line here; own data are given as a path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.hub_names import has_hub_form
from bayeslora.tasks import arc, boolq, mmlu, openbookqa, problems, text, winogrande
from bayeslora.tasks.base import Task
from bayeslora.tasks.own import OwnFormat, file_rows, hub_rows, own_task
from bayeslora.tasks.tables import TABLES
from bayeslora.tasks.tokens import TokenTask
from bayeslora.tasks.urns import NAME as URNS
from bayeslora.tasks.urns import urns_task

TaskFactory = Callable[[Path | None], Task | TokenTask[Any]]

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


def find_task(
    name_or_path: str | Path, data_dir: str | Path | None = None, how: OwnFormat | None = None
) -> Task | TokenTask[Any]:
    """A task of any kind by name, or own data by path (``./boolq`` if a directory has a task's name) or hub id.

    Args:
        name_or_path: a name in :data:`TASKS`, a path, or a data set of the hub, ``org/name``.
        data_dir: local copies of the benchmarks; without it they are read from the hub.
        how: what own data call their fields and splits.
    """
    name, how = str(name_or_path), how or OwnFormat()
    if name in TASKS:
        return TASKS[name](None if data_dir is None else Path(data_dir))
    path = Path(name).expanduser()
    if name and (_looks_like_path(name) or path.exists()):
        return text.text_task(path) if text.is_text(path) else own_task(file_rows(path, how), how)
    if has_hub_form(name):
        return own_task(hub_rows(name, how), how)
    raise _unknown(name)


def check_task_names(names: Iterable[str | None]) -> None:
    """Refuse names that no task has. Nothing is read, so that a misspelt one is told before a model's libraries are imported."""
    for name in names:
        if name is None or name in TASKS or (name and (_looks_like_path(name) or Path(name).expanduser().exists())):
            continue
        if not has_hub_form(name):
            raise _unknown(name)


def _unknown(name: str) -> InputError:
    hint = did_you_mean(name, TASKS)
    return InputError(
        f"unknown task {name!r}{hint}; choose {', '.join(TASKS)}, or pass a file of rows (.jsonl, .csv, .parquet), of plain text "
        "(.txt), or a data set of the hub (org/name)"
    )


def load_task(name_or_path: str | Path, data_dir: str | Path | None = None, how: OwnFormat | None = None) -> Task:
    """A task of questions with options; others are refused (see :func:`find_task`)."""
    return require_options(find_task(name_or_path, data_dir, how))


def require_options(task: Task | TokenTask[Any]) -> Task:
    """A task of questions with options; others are refused."""
    if not isinstance(task, Task):
        raise InputError(
            f"task {task.name!r} has no questions with options, which are needed here; choose another task"
        )
    return task


def _looks_like_path(name: str) -> bool:
    if name.endswith((*TABLES, *text.SUFFIXES)) or name.startswith((".", "~", os.sep)):
        return True
    return os.sep in name and not has_hub_form(name)
