"""Detect the kind of a directory and write its report."""

from __future__ import annotations

from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.report.ablation import ablation_report, find_ablations
from bayeslora.report.blocks import Report
from bayeslora.report.comparison import comparison_report
from bayeslora.report.quickstart import is_quickstart, quickstart_report
from bayeslora.report.run import is_run, run_report
from bayeslora.report.search import search_report
from bayeslora.report.write import require_replaceable, write_report

_RUNS = ("runs/*/*/*/seed-*", "search/*/*/*/seed-*", "*/runs/*/seed-*", "runs/*/seed-*")
"""Where comparisons and ablations keep their runs, and an ablation below the directory of its task."""


def make_report(directory: Path, out: Path | None = None) -> Path:
    """Write the report of a run or a study, by default into its ``report/``; returns the path of the page.

    Everything comes from the files in the directory; no model is loaded.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "no such directory"
        raise InputError(f"{directory}: {what}; give a directory that bayeslora has written")
    out = directory / "report" if out is None else out
    require_replaceable(out)  # fail early
    return write_report(_report(directory, out), out)


def _report(directory: Path, out: Path) -> Report:
    if (directory / "trials.json").exists():
        return search_report(directory, out)
    if is_run(directory):
        return run_report(directory)
    if ablations := find_ablations(directory):
        return ablation_report(directory, ablations, out)
    if (directory / "table.json").exists():
        return comparison_report(directory, out)
    if is_quickstart(directory):
        return quickstart_report(directory, out)
    if any(any(directory.glob(runs)) for runs in _RUNS):
        raise InputError(f"{directory}: the study is not done; give its command again to go on with it, then report")
    raise InputError(
        f"{directory}: holds nothing to report on; give a directory that bayeslora train, evaluate, compare, ablate, tune or "
        "quickstart has written"
    )
