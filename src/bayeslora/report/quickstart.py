"""Report of a quickstart: LoRA and Bayesian-LoRA side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.figures.table import COLUMNS, Column
from bayeslora.report.blocks import Gallery, Methods, Report, Section
from bayeslora.report.reading import checking, read_record
from bayeslora.report.settings import environment_section, run_settings
from bayeslora.report.study import INTERVALS, answer_figures, bounds_of, make_rows, read_all, runs_section
from bayeslora.runs.directory import RunDirectory

METHODS = ("lora", "bayesian-lora")
_COLUMNS = (*COLUMNS, Column("distance_to_truth", "distance to truth ↓"))


def is_quickstart(directory: Path) -> bool:
    """Whether a directory has the runs of both methods, or an unfinished one."""
    return any(RunDirectory(directory / method).config.exists() for method in METHODS)


def quickstart_report(directory: Path, out: Path) -> Report:
    """Make the report from both runs."""
    places = {method: directory / method for method in METHODS}
    results: dict[str, dict[str, Any]] = {}
    for method, path in places.items():
        if not RunDirectory(path).result.exists():
            raise InputError(
                f"{directory}: the quickstart is not done; give its command again to go on with it, then report"
            )
        results[method] = read_record(RunDirectory(path).result)
    with checking(RunDirectory(places[METHODS[-1]]).result):
        recorded = {method: {"runs": [{**result, "seed": 0}]} for method, result in results.items()}
        answered = read_all("quickstart", recorded, {method: {0: path} for method, path in places.items()})
        last = results[METHODS[-1]]
        count = last["counts"]["test"]["questions"]
        caption = (
            f"On {count} urns that neither has seen; ACC and ECE in per cent. The task knows the truth: no model can "
            f"expect an NLL below {float(last['metrics']['truth_entropy']):.3f}. The best is bold. {INTERVALS}"
        )
        table = Methods("quickstart", make_rows(recorded, _COLUMNS), _COLUMNS, caption, bounds=bounds_of(answered))
        return Report(
            "quickstart",
            "LoRA and Bayesian-LoRA on urns",
            f"{last['config']['model']}, seed {last['seed']}",
            [
                Section("Result", [table]),
                Section("How far to trust them", [Gallery(answer_figures("quickstart", answered))]),
                runs_section(places, out),
                run_settings(last["config"]),
                environment_section(last["environment"], {"seed": last["seed"]}),
            ],
        )
