"""Label smoothing, off and on, side by side: a table for each metric, with tasks as columns.

python benchmarks/smoothed.py --off arc-easy/table.json cut/table.json --on smooth-easy/table.json smooth-cut/table.json

The records are those of `bayeslora compare`; methods that both have are shown. In bold is the best mean.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from across import cells
from records import command, read_sections

from bayeslora.figures.table import COLUMNS, Cell, Column, markdown


def table(sides: Mapping[str, Mapping[str, Any]], tasks: list[str], column: Column) -> str:
    """One metric of every method under every smoothing."""
    found = {label: cells(sections, column.metric) for label, sections in sides.items()}
    shared = [method for method in next(iter(found.values())) if all(method in rows for rows in found.values())]
    rows = {
        f"{method}, {label}": {task: Cell(rows[method][task].values) for task in tasks}
        for method in shared
        for label, rows in found.items()
    }
    return markdown(rows, [replace(column, metric=task, title=task) for task in tasks])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", nargs="+", type=Path, required=True)
    parser.add_argument("--on", nargs="+", type=Path, required=True)
    given = parser.parse_args()
    sides = {"0": read_sections(given.off), "0.1": read_sections(given.on)}
    tasks = [task for task in sides["0"] if task in sides["0.1"]]
    for column in sorted(COLUMNS, key=lambda column: column.metric != "nll"):
        print(f"**{column.title}**\n\n{table(sides, tasks, column)}\n")


if __name__ == "__main__":
    command(main)
