"""Links to reports, which lie outside of the documentation: Sphinx gives them as files to download, without the section."""

from __future__ import annotations

import re
from typing import Any

REPORT = re.compile(r"\]\(((?:\.\./)+benchmarks/reports/[\w-]+\.md)(?:#[\w-]+)?\)")


def mark(app: Any, page: str, source: list[str]) -> None:
    """Tell MyST that these are files and no pages."""
    source[0] = REPORT.sub(r"](path:\1)", source[0])


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", mark)
    return {"parallel_read_safe": True}
