"""Width, components, and what did not help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import mean
from typing import Any

from documents import ROOT, read, report

TASKS = ("obqa", "arcc", "arce", "wino")

SHOWN = ("nll", "tempered_nll", "acc", "ece")


def test_figures_of_what_did_not_help() -> None:
    page = report("width-and-components")
    table = page.split("## What did not help")[1].split("\n\n")[2].replace("**", "")
    record = read("average/validation.json")
    names = {"base": "default", "average": "average", "both": "average, eight draws per step"}
    kinds = {"": lambda row: min(row["validation_nll"]), ", scaled": lambda row: row["nll"]}
    for ending, nll in kinds.items():
        for variant, name in names.items():
            cells = []
            for task in ("arc-easy", "arc-challenge", "openbookqa"):
                rows = [row for row in record["rows"] if (row["variant"], row["task"]) == (variant, task)]
                cells.append(f"{mean(map(nll, rows)):.3f}" if rows else "")
            assert f"| {name}{ending} | {' | '.join(cells)} |".replace("|  |", "| |") in table


def means_of(record: dict[str, Any], variant: str, tasks: Sequence[str] = TASKS) -> str | None:
    """The row of a variant, if it was run on all tasks."""
    rows = [[row for row in record["rows"] if (row["variant"], row["task"]) == (variant, task)] for task in tasks]
    if not all(rows):
        return None
    means = {key: mean(mean(row[key] for row in of_task) for of_task in rows) for key in SHOWN}
    cells = [f"{mean(row['nll'] for row in of_task):.3f}" for of_task in rows]
    cells += [f"{means['nll']:.3f}", f"{means['tempered_nll']:.3f}"]
    cells += [f"{100 * means['acc']:.1f}", f"{100 * means['ece']:.1f}"]
    return f"| {variant} | {' | '.join(cells)} |"


def test_figures_of_several_components() -> None:
    page = report("width-and-components").split("## Several components")[1]
    tables = [part.replace("**", "") for part in page.split("\n\n") if part.startswith("| | OpenBookQA")]
    folder = ROOT / "benchmarks/results/components"
    search, earlier = (json.loads((folder / name).read_text("utf-8")) for name in ("search.json", "validation.json"))
    known = {means_of(search, variant) for variant in search["variants"]}
    assert len(tables[0].splitlines()) > 15 and set(tables[0].splitlines()[2:]) <= known
    for method in (
        "lora",
        "blob",
        "swag",
        "deep-ensemble",
        "mc-dropout",
        "adalora",
        "c-lora",
        "bbb",
        "lora-plus",
        "ivon",
    ):
        rows = [row for row in known if row is not None and row.startswith(f"| {method},")]
        assert min(rows, key=lambda row: float(row.split("|")[6])) in tables[0]  # the best of each
    assert all((means_of(earlier, variant) or "") in tables[1] for variant in earlier["variants"])
    best = [row["validation_nll"] for row in earlier["rows"] if row["variant"] == "4 components, width 0.03"]
    assert (sum(nlls[-1] == min(nlls) for nlls in best), len(best)) == (7, 8)


def test_figures_of_the_width_on_a_small_model() -> None:
    page = report("width-and-components").split("## The width on a small model")[1]
    record = read("components/widths-smollm2.json")
    rows = [means_of(record, variant, TASKS[:3]) for variant in record["variants"]]
    assert len(rows) == 9 and "\n".join(map(str, rows)) in page
