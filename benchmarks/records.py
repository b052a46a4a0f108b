"""Records of studies, for the scripts beside this one; what they cannot use ends them with one line and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.report.reading import checking, read_record
from bayeslora.studies.comparison import Trial
from bayeslora.studies.evaluated import Evaluated, load_evaluated
from bayeslora.studies.plan import run_path


def read_sections(paths: Sequence[Path], only: Sequence[str] = ()) -> dict[str, Any]:
    """The parts of all records, by task; those wanted in their order, if any are named.

    Records of one task with different seeds are put together, see :func:`with_more_seeds`.
    """
    sections: dict[str, Any] = {}
    for path in paths:
        with checking(path):
            found = read_record(path)["sections"]
            for task, rows in found.items():
                sections[task] = with_more_seeds(sections[task], rows, f"{path}: {task}") if task in sections else rows
    for task in only:
        if task not in sections:
            raise InputError(
                f"no part {task!r} in the records{did_you_mean(task, sections)}; there are {', '.join(sections)}"
            )
    return {task: sections[task] for task in only} if only else sections


def with_more_seeds(rows: Mapping[str, Any], more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rows of a task with the runs of further seeds. A method ties the best if it does in every record."""
    joined = {**more, **rows}
    for method in rows.keys() & more.keys():
        runs = [*rows[method]["runs"], *more[method]["runs"]]
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) < len(seeds):
            raise InputError(f"{where}: {method} has seeds that a record before it has; give each seed once")
        ties = [record[method].get("ties_best", {}) for record in (rows, more)]
        both = {metric: ties[0][metric] and ties[1][metric] for metric in ties[0].keys() & ties[1].keys()}
        joined[method] = {**rows[method], "runs": runs, "ties_best": both}
    return {method: joined[method] for method in dict.fromkeys((*rows, *more))}


def runs_of(study: Path, record: Mapping[str, Any], task: str, method: str) -> list[Evaluated]:
    """The runs behind a row of a comparison's table, those that are done, at the learning rate that was chosen."""
    factors, epochs = record["chosen_rate_factors"], record.get("chosen_epochs", {})
    name = f"{task}/{method}" if f"{task}/{method}" in factors else f"{task}/lora"
    if name not in factors:
        tasks = ", ".join(record["study"]["tasks"])
        raise InputError(f"{study}: no learning rate was chosen for {method} on {task}; its tasks are {tasks}")
    trial = Trial(factors[name], epochs.get(name))
    places = {seed: run_path(study, task, method, trial, seed) for seed in record["study"]["seeds"]}
    return [run for seed, path in places.items() if (run := load_evaluated(path, seed)) is not None]


def command(main: Callable[[], None]) -> None:
    """Run a script."""
    try:
        main()
    except (InputError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
