"""Report of one run, or of an evaluation of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.report.blocks import Block, Cards, Columns, Facts, Gallery, Note, Plain, Report, Section
from bayeslora.report.history import history_block
from bayeslora.report.questions import answer_drawings, mistakes_table, read_answers
from bayeslora.report.reading import checking, numbers, read_record, read_result
from bayeslora.report.settings import environment_section, facts, run_settings, shown
from bayeslora.report.tokens import token_sections
from bayeslora.report.wording import card, in_words, metrics_table
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.studies.study import task_name
from bayeslora.wording import counted

_CARDS = {
    "acc": "Accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "cot_nll": "CoT-NLL",
    "cot_ece": "CoT-ECE",
    "uncertain_nll": "NLL, uncertain",
    "uncertain_ece": "ECE, uncertain",
}


def is_run(path: Path) -> bool:
    """Whether a directory has a run, finished or not, or an evaluation. Models have a ``config.json``, too."""
    directory = RunDirectory(path)
    return directory.result.exists() or (directory.config.exists() and "method" in read_record(directory.config))


def run_report(path: Path) -> Report:
    """Make the report from ``result.json``, ``config.json``, the predictions and the calibration."""
    directory = RunDirectory(path)
    if not directory.result.exists():
        raise InputError(f"{path}: the run is not done; give its train command again to go on with it, then report")
    result = read_result(directory)
    config = read_record(directory.config) if directory.config.exists() else None
    with checking(directory.result):
        return _Run(directory, result, config).report()


class _Run:
    def __init__(self, directory: RunDirectory, result: RunResult, config: Mapping[str, Any] | None) -> None:
        self.directory, self.result = directory, result
        self.config: Mapping[str, Any] = result.config if config is None else config
        self.evaluation = config is None
        self.metrics = numbers(result.metrics)
        self.calibrated = numbers((result.calibrated or {}).get("metrics", {}))
        self.intervals = _bounds(result.intervals)

    def report(self) -> Report:
        config, split = self.config, self.result.split
        task = task_name(self.result.task or config["task"])
        sections = [self._summary(), *self._predictions(), self._training(), self._calibration()]
        sections += [self._all_metrics(), self._cost(), run_settings(config), self._environment()]
        return Report(
            "evaluation" if self.evaluation else "run",
            f"{config['method']} on {task}",
            f"{config['model']}, {split} split, seed {config['seed']}",
            sections,
        )

    def _summary(self) -> Section:
        figures, intervals = self.metrics, self.intervals
        if self.calibrated:
            figures, intervals = self.calibrated, _bounds((self.result.calibrated or {}).get("intervals", {}))
        found = [card(title, name, figures, intervals) for name, title in _CARDS.items() if name in figures]
        samples = self.result.samples if self.result.samples is not None else self.config["prediction"]["samples"]
        draws = f"{counted(samples, 'weight draw')} where the method draws" if samples else "the posterior mean"
        questions = self.result.counts.get(self.result.split, {}).get("questions")
        size = "the questions" if questions is None else counted(questions, "question")
        about = size if self.directory.predictions.exists() else "every token"
        if self.directory.answers.exists():
            about = f"{counted(self.result.solutions or 0, 'free answer')} (NLL: the tokens of the accepted ones)"
        told = f"On {about} of the {self.result.split} split, averaged over {draws}."
        blocks: list[Block] = [Cards(found), Note(f"{told} Calibrated." if self.calibrated else told)]
        if self.directory.predictions.exists():
            blocks.append(Note(in_words(figures)))
        if self.calibrated:
            rows = [
                [title, f"{self.metrics[name]:.4f}", f"{self.calibrated[name]:.4f}"]
                for name, title in _CARDS.items()
                if name in self.calibrated
            ]
            chosen = (
                "the confidence was fitted"
                if self.directory.answers.exists()
                else "posterior scale and temperature were chosen"
            )
            caption = f"Calibrated: {chosen} on other questions than these."
            blocks.append(Plain("calibrated", ["metric", "as trained", "calibrated"], rows, caption, frozenset({1, 2})))
        return Section("Result", blocks)

    def _predictions(self) -> list[Section]:
        if self.directory.predictions.exists():
            after = None
            if self.calibrated:
                after = read_answers(self.directory.path, self.calibrated, calibrated=True)
            drawings = answer_drawings(read_answers(self.directory.path, self.metrics), after)
            shown = self.directory.calibrated if self.calibrated else self.directory.predictions
            return [Section("How far to trust it", [Gallery(drawings), *mistakes_table(shown)])]
        found = token_sections(self.directory.path, self.result)
        if not found:
            raise InputError(
                f"{self.directory.path}: has a result but no predictions; restore them, or run its command again"
            )
        return found

    def _training(self) -> Section:
        history = self.result.history or []
        if not history:
            return Section("Training", [])
        return Section("Training", [history_block(history), Note(self._ended(history))])

    def _ended(self, history: Sequence[Mapping[str, Any]]) -> str:
        last, times = history[-1], "once" if len(history) == 1 else f"{len(history)} times"
        told = f"{last['step']} steps up to epoch {last['epoch']}, evaluated {times} on the validation split."
        if self.result.stopped_early:
            told += " It stopped early, since validation NLL no longer fell; the best state was kept."
        if not any("kl" in record for record in history):
            told += " This run has not recorded its KL terms."
        return told

    def _calibration(self) -> Section:
        if self.evaluation or not self.directory.calibration.exists():
            return Section("Calibration", [])
        found = Calibration.load(self.directory.calibration)
        chosen = {
            "temperature": found.temperature,
            "posterior scale": found.posterior_scale,
            "draws differ in layers": found.draw_layers,
            "answers from confidence": found.threshold,
            "target": found.target,
            "draws while choosing": found.samples,
            "chosen on": f"{found.task}, {found.split} split" if found.task else "validation data",
            "questions": found.questions,
        }
        sets = {f"level {level}": f"probability ≥ {1 - score:.4f}" for level, score in found.conformal.items()}
        groups = [facts("chosen after training", chosen)] + ([facts("prediction sets", sets)] if sets else [])
        blocks: list[Block] = [Columns(groups)]
        if found.before:
            rows = [[name, f"{value:.4f}", f"{found.after[name]:.4f}"] for name, value in found.before.items()]
            caption = "On the data it was chosen on, which makes it look better than it is."
            blocks.append(Plain("calibration", ["metric", "before", "after"], rows, caption, frozenset({1, 2})))
            if not self.calibrated:
                blocks.append(Note("The figures above are of the run as it was trained, before this calibration."))
        blocks += [Note(f"{warning[:1].upper()}{warning[1:]}.") for warning in found.warnings]
        return Section("Calibration", blocks)

    def _all_metrics(self) -> Section:
        caption = (
            f"{shown(self.result.split).capitalize()} split, as fractions and nats. Intervals are 95 % bootstrap over "
            "questions."
            if self.intervals
            else f"{shown(self.result.split).capitalize()} split, as fractions and nats."
        )
        return Section("All metrics", [metrics_table(self.metrics, self.intervals, caption)])

    def _cost(self) -> Section:
        groups: list[Facts] = []
        times = {
            name: f"{value:,} steps" if name == "steps" else _seconds(value)
            for name, value in self.result.timing.items()
        }
        groups.append(facts("time", {name.replace("_seconds", ""): value for name, value in times.items()}))
        sizes = {f"{name} parameters": f"{count:,}" for name, count in (self.result.parameters or {}).items()}
        sizes["peak memory"] = f"{(self.result.memory or {})['peak_bytes'] / 2**30:.2f} GiB"
        groups.append(facts("size", sizes))
        groups += [facts(f"data, {split}", counts) for split, counts in self.result.counts.items()]
        if self.result.found:
            groups.append(facts("found by the method", self.result.found))
        return Section("Cost and data", [Columns(groups)])

    def _environment(self) -> Section:
        more = {"processes": self.result.processes or 1, "seed": self.result.seed}
        return environment_section(self.result.environment or {}, more)


def _bounds(intervals: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    return {name: (float(it["low"]), float(it["high"])) for name, it in intervals.items()}


def _seconds(value: float) -> str:
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"
