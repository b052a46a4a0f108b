"""Reports of the comparisons that the repository keeps the records of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bayeslora.report import make_report
from report.pages import read_page
from train.tiny import read_json

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
RECORDS = [
    RESULTS / name for name in ("table/cut.json", "shift/openbookqa.json", "wikitext2/table.json", "math/table.json")
]


@pytest.mark.system
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_every_figure_of_a_run_is_there_and_marks_are_explained_where_there_are_any(
    record: Path, tmp_path: Path
) -> None:
    shutil.copy(record, tmp_path / "table.json")
    page, sections = read_page(make_report(tmp_path).parent), read_json(record)["sections"]
    marked = any(any(it.get("ties_best", {}).values()) for section in sections.values() for it in section.values())
    assert ("†" in page.text) == marked
    runs = [run["metrics"] for section in sections.values() for it in section.values() for run in it["runs"]]
    _, *rows = page.tables["table-runs"]
    for row, figures in zip(rows, runs, strict=True):
        nll = figures.get("nll", figures.get("cot_nll"))
        assert row[4] == f"{nll:.3f}"
