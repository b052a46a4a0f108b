"""A comparison across its tasks: one table for each metric, with methods as rows and tasks as columns.

python benchmarks/across.py TABLE.json [TABLE.json ...] [--section ARC-EASY ...] [--seeds 0 ...] [--metrics nll aurc] > all.md

Each TABLE.json is the record that `bayeslora compare` has written; several are put side by side. The last column is the mean
rank of a method over the tasks; rows are sorted by it, and methods that lack a task, which have none, come last. With --ranks
there is one table of ranks alone. With --means there
is one of the means over the tasks, without the methods that lack one, and with deviations where all tasks have the same seeds.
--figure draws accuracy against calibration error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from records import command, read_sections

from bayeslora.errors import InputError
from bayeslora.figures.scatter import scatter_figure
from bayeslora.figures.table import CALIBRATED_COLUMNS, COLUMNS, Cell, Column, Row, markdown
from bayeslora.studies.question_sections import DISTANCE_COLUMN, SHIFT_COLUMNS

RANK = "rank"
KNOWN = {column.metric: column for column in (*SHIFT_COLUMNS, DISTANCE_COLUMN, *CALIBRATED_COLUMNS)}


def by_seed(sections: Mapping[str, Any], metric: str) -> dict[str, dict[str, dict[int, float]]]:
    """One metric by method, task and seed."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for task, methods in sections.items():
        for method, record in methods.items():
            values = {run["seed"]: run["metrics"][metric] for run in record["runs"] if metric in run["metrics"]}
            if values:
                found.setdefault(method, {})[task] = values
    return found


def cells(sections: Mapping[str, Any], metric: str) -> dict[str, dict[str, Cell]]:
    """One metric by method and task."""
    return {
        method: {
            task: Cell(tuple(values.values()), sections[task][method].get("ties_best", {}).get(metric, False))
            for task, values in row.items()
        }
        for method, row in by_seed(sections, metric).items()
    }


def of_seeds(sections: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """The runs of these seeds alone; what ties the best was found with all of them, and is left out."""
    found: dict[str, Any] = {}
    for task, methods in sections.items():
        kept = {name: [run for run in it["runs"] if run["seed"] in seeds] for name, it in methods.items()}
        found[task] = {name: {"runs": runs} for name, runs in kept.items() if runs}
        if not found[task]:
            there = sorted({run["seed"] for it in methods.values() for run in it["runs"]})
            raise InputError(f"no run on {task} has one of the seeds {list(seeds)}; there are {there}")
    return found


def with_ranks(rows: Mapping[str, Mapping[str, Cell]], tasks: Sequence[str], column: Column) -> dict[str, Row]:
    """The rows with the mean rank of each method, 1 being the best; a method with a gap has none."""
    complete = {method: row for method, row in rows.items() if all(task in row for task in tasks)}
    ranks: dict[str, list[int]] = {method: [] for method in complete}
    for task in tasks:
        for method, row in complete.items():
            better = [it for it in complete.values() if column.better(it[task].mean, row[task].mean)]
            ranks[method].append(1 + len(better))
    return {
        method: {**row, RANK: Cell((mean(ranks[method]),))} if method in ranks else row for method, row in rows.items()
    }


def tables(sections: Mapping[str, Any], columns: Sequence[Column] = COLUMNS) -> dict[str, str]:
    """A table in Markdown for each metric, by its title."""
    found = {}
    for column in columns:
        shown = [replace(column, metric=task, title=task.split(" → ")[-1]) for task in sections]
        rank = Column(RANK, "mean rank", digits=1)
        rows = _by_rank(with_ranks(cells(sections, column.metric), list(sections), column))
        unit = ", per cent" if column.factor == 100 else ""
        found[column.title + unit] = markdown(rows, [*shown, rank])
    return found


def _by_rank(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows with the lowest mean rank on top; those without a rank at the end."""
    return dict(sorted(rows.items(), key=lambda item: item[1][RANK].mean if RANK in item[1] else math.inf))


def rank_table(sections: Mapping[str, Any], columns: Sequence[Column] = COLUMNS) -> str:
    """Mean ranks in all metrics, the best method by the first of them on top."""
    ranks: dict[str, dict[str, Cell]] = {}
    for column in columns:
        for method, row in with_ranks(cells(sections, column.metric), list(sections), column).items():
            if RANK in row:
                ranks.setdefault(method, {})[column.metric] = row[RANK]
    shown = [Column(column.metric, column.title.rstrip("↑↓ "), digits=1) for column in columns]
    return markdown(_by_first(ranks, shown[0]), shown)


def _by_first(rows: Mapping[str, Mapping[str, Cell]], first: Column) -> dict[str, Mapping[str, Cell]]:
    """Rows with the best by the first column on top, without those that lack it."""
    known = [(method, row) for method, row in rows.items() if first.metric in row]
    return dict(sorted(known, key=lambda item: item[1][first.metric].mean, reverse=first.largest))


def mean_table(sections: Mapping[str, Any], columns: Sequence[Column], deviations: bool = True) -> str:
    """Means over the tasks in all metrics, the best method by the first of them on top.

    They are by seed; where a method has other seeds on some tasks than on others, or without deviations, there is one mean, of
    the tasks' own.
    """
    rows: dict[str, dict[str, Cell]] = {}
    for column in columns:
        for method, row in by_seed(sections, column.metric).items():
            if len(row) == len(sections):
                values = _over_tasks(list(row.values()))
                rows.setdefault(method, {})[column.metric] = Cell(values if deviations else (mean(values),))
    return markdown(_by_first(rows, columns[0]), columns)


def _over_tasks(tasks: Sequence[Mapping[int, float]]) -> tuple[float, ...]:
    """Mean over the tasks of every seed, or one of all if the tasks have different seeds."""
    seeds = tasks[0].keys()
    if any(task.keys() != seeds for task in tasks):
        return (mean(mean(task.values()) for task in tasks),)
    return tuple(mean(task[seed] for task in tasks) for seed in seeds)


def draw(sections: Mapping[str, Any], path: Path) -> None:
    """Accuracy against calibration error, a panel for each task."""
    shown: dict[str, dict[str, dict[str, Cell]]] = {task: {} for task in sections}
    for metric in ("acc", "ece"):
        for method, row in cells(sections, metric).items():
            for task, cell in row.items():
                shown[task].setdefault(method, {})[metric] = cell
    scatter_figure(shown, path)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--section", nargs="*", default=[], help="tasks, in the order wanted; all by default")
    parser.add_argument("--seeds", nargs="*", type=int, default=[], help="runs of these seeds alone; all by default")
    parser.add_argument("--metrics", nargs="*", choices=KNOWN, default=[column.metric for column in COLUMNS])
    parser.add_argument("--ranks", action="store_true", help="mean ranks over the tasks alone")
    parser.add_argument("--means", action="store_true", help="means over the tasks alone, also after calibration")
    parser.add_argument("--no-deviations", action="store_true", help="such means without deviations over the seeds")
    parser.add_argument("--figure", type=Path, default=None, help="where to draw accuracy against calibration error")
    given = parser.parse_args()
    sections = read_sections(given.tables, given.section)
    if given.seeds:
        sections = of_seeds(sections, given.seeds)
    if given.figure is not None:
        draw(sections, given.figure)
    if given.ranks:
        order = sorted(COLUMNS, key=lambda column: column.metric != "nll")
        print(rank_table(sections, order))
        return
    if given.means:
        order = sorted((*COLUMNS, *CALIBRATED_COLUMNS), key=lambda column: column.metric != "nll")
        print(mean_table(sections, order, deviations=not given.no_deviations))
        return
    columns = [KNOWN[metric] for metric in given.metrics]
    for title, text in tables(sections, columns).items():
        print(f"**{title}**\n\n{text}\n")


if __name__ == "__main__":
    command(main)
