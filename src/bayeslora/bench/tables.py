"""Benchmark results as Markdown tables: one row per measurement, or one per method."""

from __future__ import annotations

from collections.abc import Sequence

from bayeslora.bench.rows import Row

PARAMETERS = "parameters"


def line_by_line(rows: Sequence[Row]) -> str:
    """One row per measurement with all its figures, and ratios with quartiles."""
    lines = ["| what | method | measured | ratio to PEFT LoRA |", "|---|---|---|---|"]
    for row in rows:
        shown = ", ".join(_figure(name, value) for name, value in row.figures.items())
        ratio = "" if row.ratio is None else f"{row.ratio[0]:.3f} ({row.ratio[1]:.3f} to {row.ratio[2]:.3f})"
        lines.append(f"| {row.what} | {row.who} | {shown} | {ratio} |")
    return "\n".join(lines)


def by_method(rows: Sequence[Row]) -> str:
    """One row per method: trainable parameters, and times and sizes with their ratios to PEFT's LoRA."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        method, _, how = row.who.partition(", ")
        shown = cells.setdefault(method, {})
        column = f"{row.what}, {how}" if how else row.what
        for name, value in row.figures.items():
            if name == PARAMETERS:
                shown[PARAMETERS] = f"{value:,.0f}"
            else:
                ratio = "" if row.ratio is None else f" ({row.ratio[0]:.2f}×)"
                shown[column] = f"{_figure(name, value)}{ratio}"
    found = dict.fromkeys(column for shown in cells.values() for column in shown)
    columns = sorted(found, key=lambda column: column != PARAMETERS)
    lines = ["| method | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    lines += [
        f"| {method} | " + " | ".join(shown.get(name, "") for name in columns) + " |" for method, shown in cells.items()
    ]
    return "\n".join(lines)


def _figure(name: str, value: float) -> str:
    if name == "median":
        return f"{1000 * value:.2f} ms"
    if name == "bytes":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:,.0f} {name}"
