"""Write a report to files. An older report is replaced; other files are never touched."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.report.blocks import Report
from bayeslora.report.html import to_html
from bayeslora.report.svg import to_svg
from bayeslora.report.tables import to_latex, to_markdown

PAGE = "index.html"
_LIST = "report.json"
_SCHEMA = 1
_SHARP = 300
"""Dots per inch of the figures, sufficient for papers."""


def require_replaceable(out: Path) -> None:
    """Refuse a directory that contains anything but an earlier report."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose a directory with --out")
    if not out.exists():
        return
    found = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    strangers = sorted(found - _listed(out))
    if strangers:
        raise InputError(
            f"{out}: holds files that are no report of ours ({strangers[0]}{', ...' if len(strangers) > 1 else ''}); move them, "
            "or choose another directory with --out"
        )


def write_report(report: Report, out: Path) -> Path:
    """Write the report atomically; returns the path of the page."""
    require_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        new, old = Path(folder, "new"), Path(folder, "old")
        _fill(report, new)
        if out.exists():
            out.rename(old)
        new.rename(out)
    return out / PAGE


def _fill(report: Report, place: Path) -> None:
    for folder in (place, place / "figures", place / "tables"):
        folder.mkdir()
    svgs = {}
    for drawing in report.drawings:
        drawing.figure.draw_without_rendering()
        drawing.figure.set_layout_engine(None)  # laid out once for both formats
        svgs[drawing.name] = to_svg(drawing.figure)
        _write(place / "figures" / f"{drawing.name}.svg", svgs[drawing.name])
        drawing.figure.savefig(place / "figures" / f"{drawing.name}.png", dpi=_SHARP)
    for table in report.tables:
        _write(place / "tables" / f"{table.name}.md", to_markdown(table))
        _write(place / "tables" / f"{table.name}.tex", to_latex(table))
    _write(place / PAGE, to_html(report, svgs))
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    write_json(place / _LIST, {"schema": _SCHEMA, "made_by": "bayeslora report", "files": [*files, _LIST]})


def _listed(out: Path) -> set[str]:
    """Files of the existing report, if there is one."""
    try:
        return set(json.loads((out / _LIST).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
