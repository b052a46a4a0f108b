"""The parts of a study's record as tables: what `bayeslora compare` wrote beside it, without making it again.

python benchmarks/sections.py TABLE.json [TABLE.json ...] [--section "openbookqa → mmlu-law" ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from across import cells
from records import command, read_sections

from bayeslora.figures.table import COLUMNS, Cell, Column, markdown
from bayeslora.studies.question_sections import DISTANCE_COLUMN, SHIFT_COLUMNS
from bayeslora.studies.token_sections import PROBLEM_COLUMNS, TEXT_COLUMNS

KINDS: tuple[tuple[Column, ...], ...] = (
    PROBLEM_COLUMNS,
    TEXT_COLUMNS,
    (*SHIFT_COLUMNS, DISTANCE_COLUMN),
    SHIFT_COLUMNS,
    COLUMNS,
)
"""From the most to the least special."""


def columns_of(section: Mapping[str, Any]) -> Sequence[Column]:
    """Those of the first kind of table for which some run has every figure."""
    runs = [run["metrics"] for record in section.values() for run in record["runs"]]
    return next(kind for kind in KINDS if any(all(column.metric in run for column in kind) for run in runs))


def table(title: str, section: Mapping[str, Any]) -> str:
    """A part in Markdown."""
    shown = columns_of(section)
    rows: dict[str, dict[str, Cell]] = {method: {} for method in section}
    for column in shown:
        for method, found in cells({title: section}, column.metric).items():
            rows[method][column.metric] = found[title]
    return markdown(rows, shown)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--section", nargs="*", default=[], help="which, in the order wanted; all by default")
    given = parser.parse_args()
    for title, section in read_sections(given.tables, given.section).items():
        print(f"## {title}\n\n{table(title, section)}\n")


if __name__ == "__main__":
    command(main)
