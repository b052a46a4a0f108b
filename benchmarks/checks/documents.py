"""Pages of the documentation, the records behind them, and what the scripts of the benchmarks print of these."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks/results"
REPORTS = ROOT / "benchmarks/reports"


def text_of(name: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def report(name: str) -> str:
    """The text of a report."""
    return text_of(f"benchmarks/reports/{name}.md")


def read(name: str) -> Any:
    """A record in ``benchmarks/results``."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def printed_by(script: str, *given: object) -> str:
    """What a script of the benchmarks prints, without a process of its own."""
    path, printed = ROOT / "benchmarks" / f"{script}.py", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [str(path), *map(str, given)])
        patch.syspath_prepend(path.parent)
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue().strip()
