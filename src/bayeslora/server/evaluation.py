"""Metrics of a run, from the files in its directory.

A run stores metrics as trained and after its own calibration. A later ``bayeslora calibrate`` changes predictions: a new
temperature can be applied to the stored ones, and a new confidence to stored free answers, but a new posterior scale cannot.
Metrics of the model as served then come from ``bayeslora evaluate --out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.errors import InputError
from bayeslora.metrics import bootstrap_interval, reliability_bins, risk_coverage
from bayeslora.metrics.scores import top_class
from bayeslora.predict.calibrate import Calibration, apply_temperature
from bayeslora.predict.mc import keep_possible
from bayeslora.predict.questions.predictions import INTERVALS, read_predictions
from bayeslora.runs.answer_file import read_answers
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.free_answers import answer_metrics, with_confidence
from bayeslora.runs.saved_config import saved_run, to_dict
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.schemas import Bins, CoveragePoint, Evaluation, Span

POINTS = 200
"""Maximum points of the curve; longer curves are thinned evenly."""


@dataclass(frozen=True)
class Measured:
    """Metrics of a split, if available, and whether they are of the model as served."""

    result: Mapping[str, Any]
    predictions: tuple[NDArray[np.float64], NDArray[np.int64]] | None
    as_served: bool


def evaluate_run(trained: TrainedModel, name: str, max_samples: int, evaluation: Path | None = None) -> Evaluation:
    """Collect the metrics of a run; parts that it did not store are ``None``.

    Args:
        trained: the run.
        name: of the model.
        max_samples: maximum draws per request.
        evaluation: directory written by ``bayeslora evaluate --out``; its metrics replace the run's own.
    """
    config, calibration = trained.config, trained.calibration
    measured = _own(trained) if evaluation is None else _of_evaluation(trained, RunDirectory(evaluation))
    result, predictions = measured.result, measured.predictions
    return Evaluation(
        model=name,
        method=config.method,
        base_model=config.model,
        task=result.get("task", config.task),
        samples=trained.samples,
        max_samples=max_samples,
        chat=trained.loaded.tokenizer.chat_template is not None,
        split=result.get("split"),
        questions=None if predictions is None else len(predictions[1]),
        metrics=result.get("metrics"),
        intervals=_spans(result.get("intervals")),
        calibration=None if calibration == Calibration() else asdict(calibration),
        as_served=measured.as_served,
        reliability=None if predictions is None else reliability(*predictions),
        risk_coverage=None if predictions is None else coverage_curve(*predictions),
    )


def _own(trained: TrainedModel) -> Measured:
    """Metrics stored by the run: as served if possible, recomputed at the served temperature if the draws are the same."""
    directory, calibration = trained.directory, trained.calibration
    result = directory.read_result() if directory.result.exists() else {}
    same_samples = trained.samples == trained.config.prediction.samples
    if same_samples and (after := _calibrated(result, directory, trained)) is not None:
        return after
    predictions = _read(directory.predictions)
    same_draws = (
        same_samples
        and calibration.posterior_scale == 1.0
        and trained.draw_layers == trained.config.prediction.draw_layers
    )
    if same_draws and (answered := _answered(result, directory, calibration)) is not None:
        return answered
    change = calibration.temperature / result.get("found", {}).get("temperature", 1.0)
    if not same_draws or change == 1.0 or predictions is None:
        return Measured(result, predictions, same_draws and change == 1.0)
    return Measured(*_at_temperature(result, *predictions, change), as_served=True)


def _calibrated(result: Mapping[str, Any], directory: RunDirectory, trained: TrainedModel) -> Measured | None:
    """Metrics after calibration, if it is the one in use."""
    after = result.get("calibrated")
    served = trained.calibration.temperature, trained.calibration.posterior_scale, trained.draw_layers
    names = ("temperature", "posterior_scale", "draw_layers")
    if not isinstance(after, dict) or served != tuple(after.get(name) for name in names):
        return None
    changed = {name: after.get(name) for name in ("metrics", "intervals")}
    return Measured({**result, **changed}, _read(directory.calibrated), as_served=True)


def _answered(result: Mapping[str, Any], directory: RunDirectory, calibration: Calibration) -> Measured | None:
    """Metrics of stored free answers with the confidence that is served, if there are any; they have no intervals."""
    if calibration.confidence is None or not directory.answers.exists():
        return None
    records = with_confidence(read_answers(directory.answers), calibration)
    return Measured({**result, "metrics": {**result["metrics"], **answer_metrics(records)}}, None, as_served=True)


def _at_temperature(
    result: Mapping[str, Any], probabilities: NDArray[np.float64], gold: NDArray[np.int64], temperature: float
) -> tuple[dict[str, Any], tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Main metrics and predictions at a temperature; chosen answers, and with them accuracy, stay the same."""
    with np.errstate(divide="ignore"):  # absent options have probability 0
        log_probabilities = apply_temperature(np.log(probabilities), temperature)
    softened = keep_possible(np.exp(log_probabilities), log_probabilities)
    spans = {
        name: asdict(bootstrap_interval(metric, softened, gold)) for name, metric in INTERVALS.items() if name != "acc"
    }
    metrics = {name: span["value"] for name, span in spans.items()}
    kept = {
        part: {"acc": result[part]["acc"]} if "acc" in result.get(part, {}) else {} for part in ("metrics", "intervals")
    }
    changed = {"metrics": kept["metrics"] | metrics, "intervals": kept["intervals"] | spans}
    return {**result, **changed}, (softened, gold)


def _of_evaluation(trained: TrainedModel, place: RunDirectory) -> Measured:
    """Metrics of a later evaluation; refuses that of another run."""
    if not place.result.exists():
        raise InputError(f"{place.path}: contains no evaluation; give a directory written by bayeslora evaluate --out")
    result = place.read_result()
    known = result.get("calibration")
    if known is None or saved_run(result["config"]) != saved_run(to_dict(trained.config)):
        raise InputError(
            f"{place.path}: is not an evaluation of {trained.directory.path}; create one with bayeslora evaluate --out"
        )
    same_samples = result["samples"] == trained.samples
    if same_samples and (after := _calibrated(result, place, trained)) is not None:
        return after
    served = {name: getattr(trained.calibration, name) for name in known}
    same_draws = same_samples and result.get("draw_layers", "all") == trained.draw_layers
    same = same_draws and served == known
    if same and (answered := _answered(result, place, trained.calibration)) is not None:
        return answered
    return Measured(result, _read(place.predictions), as_served=same and "calibrated" not in result)


def _spans(intervals: Mapping[str, Mapping[str, float]] | None) -> dict[str, Span] | None:
    return {name: Span(low=span["low"], high=span["high"]) for name, span in intervals.items()} if intervals else None


def reliability(probabilities: NDArray[np.float64], gold: NDArray[np.int64]) -> Bins:
    """The bins of a reliability diagram."""
    bins = reliability_bins(probabilities, gold)
    return Bins(
        edges=bins.edges.tolist(),
        count=bins.count.tolist(),
        confidence=_or_none(bins.confidence),
        accuracy=_or_none(bins.accuracy),
    )


def coverage_curve(probabilities: NDArray[np.float64], gold: NDArray[np.int64]) -> list[CoveragePoint]:
    """Coverage and error rate by confidence threshold, from the highest threshold down to full coverage."""
    curve = risk_coverage(*top_class(probabilities, gold))
    last = len(curve.threshold) - 1
    rows = sorted({round(k * last / (POINTS - 1)) for k in range(POINTS)}) if last >= POINTS else range(last + 1)
    return [
        CoveragePoint(
            threshold=float(curve.threshold[row]),
            coverage=float(curve.coverage[row]),
            error_rate=float(curve.risk[row]),
            accuracy=1.0 - float(curve.risk[row]),
        )
        for row in rows
    ]


def _read(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
    if not path.exists():
        return None
    _, probabilities, gold = read_predictions(path)
    return probabilities, gold


def _or_none(values: Sequence[Any] | NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
