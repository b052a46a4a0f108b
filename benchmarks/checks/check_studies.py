"""Distribution shift, running text, mathematics, label smoothing, ablations, the search and answering when sure."""

from __future__ import annotations

import re

import pytest
from documents import RESULTS, printed_by, read, report

from bayeslora.studies.ablations import ABLATIONS

SMOOTHED = ["table/arc-easy.json", "table/openbookqa.json", "table/cut.json"]

SHIFTS = [
    f"openbookqa → {to}" for to in ("arc-challenge", "arc-easy", "mmlu-cs", "mmlu-eng", "mmlu-law", "mmlu-health")
]

LARGER_SHIFT = "shift/openbookqa-1.5b.json"

ALL_OF_SHIFT = ["nll", "ece", "acc", "aurc", "shift_auroc_epistemic", "shift_auroc_entropy"]


@pytest.mark.parametrize(
    ("page", "script", "given", "count"),
    [
        ("shift", "across", ["shift/openbookqa.json", "--section", *SHIFTS, "--metrics", *ALL_OF_SHIFT], 6),
        ("shift", "sections", ["shift/openbookqa.json", "--section", "openbookqa"], 1),
        (
            "shift-qwen",
            "across",
            [LARGER_SHIFT, "--section", *SHIFTS, "--metrics", *ALL_OF_SHIFT, "shift_auroc_distance"],
            7,
        ),
        ("shift-qwen", "sections", [LARGER_SHIFT, "--section", "openbookqa"], 1),
        ("wikitext2", "sections", ["wikitext2/table.json"], 2),
        ("wikitext2", "sections", ["wikitext2/one-draw.json"], 2),
        ("math", "sections", ["math/table.json", "math/aime.json"], 3),
        (
            "comparison",
            "smoothed",
            ["--off", *SMOOTHED, "--on", "smoothing/arc-easy.json", "smoothing/openbookqa.json", "smoothing/cut.json"],
            3,
        ),
    ],
    ids=[
        "shifts",
        "what was learnt before them",
        "shifts, 1.5B",
        "before them, 1.5B",
        "text",
        "text, one draw",
        "mathematics",
        "smoothing",
    ],
)
def test_tables_of_the_studies(page: str, script: str, given: list[str], count: int) -> None:
    text = report(f"{page}")
    words = [f"benchmarks/results/{word}" if word.endswith(".json") else word for word in given]
    tables = printed_by(script, *words).split("\n\n")[1::2]
    assert len(tables) == count and all(table in text for table in tables)


@pytest.mark.parametrize("task", ["arc-easy", "arc-challenge"])
def test_figures_of_answering_only_when_sure(task: str) -> None:
    page = report("selective")
    record = read(f"selective/{task}.json")
    for method, figures in record["rows"].items():
        shown = [[f"{100 * it[key]:.1f}" for key in ("value", "low", "high")] for it in figures.values()]
        assert f"| `{method}` | " + " | ".join(f"{v} ({low} to {high})" for v, low, high in shown) + " |" in page


def test_tables_of_the_ablations() -> None:
    page = report("ablations")
    printed = printed_by("ablated", *sorted((RESULTS / "ablations").glob("*.json")))
    tables = printed.split("\n\n")[1::2]
    assert len(tables) == len(ABLATIONS) and all(table in page for table in tables)


def test_figures_of_the_search() -> None:
    page = report("tuning")
    record = read("tune/arc-easy-tuned.json")
    for trial in record["front"]:
        found = trial["outcomes"]
        name = f"{trial['number']}, chosen" if trial["number"] == record["chosen"]["number"] else trial["number"]
        rate, figures = trial["values"]["learning_rate"], (100 * found["ece"], found["nll"], 100 * found["acc"])
        assert re.search(
            rf"\| {name} \| {rate:.4f} \| [\d.]+ \| {figures[0]:.1f} % \| {figures[1]:.3f} \| {figures[2]:.1f} % \|",
            page,
        )


def test_figures_of_free_answers() -> None:
    answers = report("free-answers")
    rows = read("rivals/arc-easy.json")["rows"]
    shown = [line for line in answers.splitlines() if line.startswith("|")][2:]
    assert len(shown) == len(rows) > 40
    for row in rows:
        cells = (row["model"], row["sequences"], f"{1000 * row['seconds']:.1f}", f"{row['auroc']:.3f}")
        found = [
            line
            for line in shown
            if row["score"] in line and f"| {cells[0]} | {cells[1]} | {cells[2]} | {cells[3]} " in line
        ]
        assert found, row["score"]
