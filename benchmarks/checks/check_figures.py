"""Pages for users name no measured figure that no report has."""

from __future__ import annotations

import re

import pytest
from documents import REPORTS, ROOT


@pytest.mark.parametrize(
    "page", [f"docs/{page}.md" for page in ("results", "performance", "choosing", "prediction", "faq")]
)
def test_measured_figures_are_in_reports(page: str) -> None:
    reports = "".join(report.read_text(encoding="utf-8") for report in REPORTS.glob("*.md"))
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    told = set(re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.-]*[a-zA-Z])", text))
    known = set(re.findall(r"\d+\.\d+", reports))
    assert told <= known, told - known
