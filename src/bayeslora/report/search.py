"""Report of a search for settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.figures.pareto import draw_pareto
from bayeslora.report.blocks import Block, Cards, Drawing, Gallery, Note, Plain, Report, Section
from bayeslora.report.reading import checking, numbers, read_record, read_result
from bayeslora.report.settings import environment_section, settings_section
from bayeslora.report.study import failures_section, runs_section
from bayeslora.report.wording import card, metrics_table
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import from_dict, saved_run, to_dict
from bayeslora.studies.study import task_name
from bayeslora.tuning.config import Tuning
from bayeslora.tuning.log import Trial
from bayeslora.tuning.outcome import SHOWN, Outcome, chosen_run, front_points, metric_bounds, verdict
from bayeslora.tuning.space import Space
from bayeslora.wording import counted


def search_report(directory: Path, out: Path) -> Report:
    """Make the report from the log of the trials and the summary."""
    log, tuned = directory / "trials.json", directory / "tuned.json"
    if not tuned.exists():
        raise InputError(f"{directory}: the search is not done; give its command again to go on with it, then report")
    summary, record = read_record(tuned), read_record(log)
    with checking(log):
        trials = [Trial(**trial) for trial in record["trials"]]
    with checking(tuned):
        outcome = Outcome(_tuning(summary["study"]), trials, numbers(summary["baseline"]))
        kept = None if summary["chosen"] is None else summary["chosen"]["number"]
        if any(trial.state == "planned" for trial in trials) or kept != outcome.chosen:
            raise InputError(f"{directory}: the search went on since; give its command again, then report")
        return _report(directory, outcome, summary, out)


def _report(directory: Path, outcome: Outcome, summary: Mapping[str, Any], out: Path) -> Report:
    run = outcome.tuning.run
    failures = {f"trial {trial.number}": trial.failure for trial in outcome.trials if trial.failure}
    runs = {f"trial {trial.number}": trial.path(directory) for trial in outcome.trials}
    runs |= {name: directory / name for name in ("baseline", "chosen")}
    usual = to_dict(Tuning(run=RunConfig(model="", task="")))
    return Report(
        "search",
        f"Settings of {run.method} on {task_name(run.task)}",
        f"{run.model}, {counted(len(outcome.trials), 'trial')}, validation split",
        [
            _chosen(outcome),
            _front(outcome),
            _applied(directory, outcome),
            Section("Trials", [_trials(outcome)]),
            failures_section(failures, [], _fate(outcome)),
            runs_section(runs, out),
            settings_section(summary["study"], usual, ("run.model", "run.task", "run.method")),
            environment_section(summary["environment"], {}),
        ],
    )


def _fate(outcome: Outcome) -> str:
    """What becomes of failed trials."""
    if outcome.all_failed:
        return "the same command tries them again"
    return "they are not tried again, and the search keeps away from them"


def _tuning(study: Mapping[str, Any]) -> Tuning:
    """Restore the settings of the search."""
    return Tuning(
        run=from_dict(study["run"]),
        search=tuple(study["search"]),
        constraints=tuple(study["constraints"]),
        trials=study["trials"],
        start=study["start"],
        q=study["q"],
        feasibility=study["feasibility"],
    )


def _chosen(outcome: Outcome) -> Section:
    blocks: list[Block] = []
    if outcome.chosen is not None:
        figures = numbers(outcome.trials[outcome.chosen].outcomes)
        titles = {"acc": "Accuracy", "nll": "NLL", "ece": "ECE"}
        blocks.append(Cards([card(title, name, figures, {}) for name, title in titles.items()]))
    return Section("Choice", [*blocks, Note(verdict(outcome), warning=outcome.chosen is None)])


def _front(outcome: Outcome) -> Section:
    points = front_points(outcome)
    if not points:
        return Section("Front", [])
    chosen = "none" if outcome.chosen is None else f"trial {outcome.chosen}"
    drawing = Drawing(
        "pareto",
        draw_pareto(points, outcome.hypervolumes, baseline=outcome.baseline, bounds=metric_bounds(outcome)),
        "Calibration error, NLL and accuracy on the validation split, pair by pair, and how the volume that the front dominates "
        "grew. Dashed lines are constraints.",
        f"{counted(len(points), 'trial')}, {len(outcome.front)} of them on the Pareto front; {chosen} is chosen.",
        wide=True,
    )
    return Section("Front", [Gallery([drawing])])


def _trials(outcome: Outcome) -> Plain:
    names = [axis.name for axis in outcome.tuning.axes]
    rows = []
    for trial in outcome.trials:
        settings = [f"{trial.values[name]:.4g}" for name in names]
        figures = [f"{trial.outcomes[name]:.4f}" if trial.outcomes else "—" for name in SHOWN]
        state = "failed" if trial.state == "failed" else "yes" if outcome.feasible[trial.number] else "no"
        place = "chosen" if trial.number == outcome.chosen else "yes" if trial.number in outcome.front else ""
        rows.append([str(trial.number), trial.source, *settings, *figures, state, place])
    head = ["trial", "chosen by", *names, *SHOWN, "feasible", "front"]
    marked = frozenset() if outcome.chosen is None else frozenset({outcome.chosen})
    caption = "All trials, on the validation split; outcomes as fractions and nats."
    numeric = frozenset({0, *range(2, 2 + len(names) + len(SHOWN))})
    return Plain("trials", head, rows, caption, numeric, marked)


def _applied(directory: Path, outcome: Outcome) -> Section:
    """The chosen run on the test split, if it exists; a search extended later may have chosen another."""
    place = RunDirectory(directory / "chosen")
    chosen = chosen_run(outcome, Space(outcome.tuning.axes, replace(outcome.tuning.run, report_split="validation")))
    if chosen is None or not place.result.exists():
        return Section("Chosen run, test split", [])
    result = read_result(place)
    with checking(place.result):
        if saved_run(result.config) != chosen:
            told = "The search has chosen another run since the one that was trained; tune --apply trains it."
            return Section("Chosen run, test split", [Note(told)])
        intervals = {name: (float(it["low"]), float(it["high"])) for name, it in result.intervals.items()}
        table = metrics_table(
            numbers(result.metrics), intervals, "The chosen run, trained and evaluated on the test split."
        )
    return Section("Chosen run, test split", [table])
