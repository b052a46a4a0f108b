"""The tables of benchmarks/reports/ablations.md from the records of `bayeslora ablate`.

python benchmarks/ablated.py benchmarks/results/ablations/*.json

Metrics of the task that was learnt, the best validation NLL of the runs, and what is left under a shift. In bold is the best
mean; the full tables, with what the bootstrap can tell apart, are those that the command itself writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayeslora.figures.table import Cell, Column, Row, markdown

OWN = {
    "validation": Column("validation", "validation NLL ↓"),
    "acc": Column("acc", "ACC ↑", factor=100, digits=1, largest=True),
    "nll": Column("nll", "NLL ↓"),
    "ece": Column("ece", "ECE ↓", factor=100, digits=1),
    "epistemic": Column("epistemic", "epistemic", ranked=False),
}
SHIFTED = {
    "nll": Column("shifted_nll", "shifted: NLL ↓"),
    "ece": Column("shifted_ece", "ECE ↓", factor=100, digits=1),
}


def best_validation(run: Mapping[str, Any]) -> float:
    """Of the epoch that was kept."""
    return min(epoch["validation"]["nll"] for epoch in run["history"] if "validation" in epoch)


def rows(record: Mapping[str, Any]) -> dict[str, Row]:
    """What is shown of every value."""
    own, shifted = record["sections"].values()
    found: dict[str, Row] = {}
    for label, section in own.items():
        runs = [dict(run["metrics"]) for run in section["runs"]]
        if all("history" in run for run in section["runs"]):  # runs of their own, not evaluations of the same ones
            runs = [
                {**metrics, "validation": best_validation(run)}
                for metrics, run in zip(runs, section["runs"], strict=True)
            ]
        row = {name: Cell(tuple(run[name] for run in runs)) for name in OWN if runs and name in runs[0]}
        others = [run["metrics"] for run in shifted[label]["runs"]]
        if others:
            row |= {it.metric: Cell(tuple(run[name] for run in others)) for name, it in SHIFTED.items()}
        found[label] = row
    return found


def table(record: Mapping[str, Any]) -> str:
    """An ablation in Markdown."""
    found = rows(record)
    shown = [
        column for column in (*OWN.values(), *SHIFTED.values()) if any(column.metric in row for row in found.values())
    ]
    return markdown(found, shown, record["ablation"])


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    for path in parser.parse_args().records:
        record = json.loads(path.read_text(encoding="utf-8"))
        print(f"{record['ablation']}\n\n{table(record)}\n")


if __name__ == "__main__":
    main()
