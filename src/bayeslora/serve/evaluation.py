"""How good a run is, from what it has left in its directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.metrics import reliability_bins, risk_coverage
from bayeslora.metrics.scores import top_class
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.predictions import read_predictions
from bayeslora.serve.schemas import Bins, CoveragePoint, Evaluation
from bayeslora.train.directory import RunDirectory
from bayeslora.train.trained import TrainedModel

POINTS = 200
"""Of the curve, at most; more are thinned out evenly."""


def evaluate_run(trained: TrainedModel, name: str, max_samples: int) -> Evaluation:
    """What is known of a run; parts that it has not left behind are missing."""
    config, calibration = trained.config, trained.calibration
    result = trained.directory.read_result() if trained.directory.result.exists() else {}
    predictions = _read(trained.directory)
    return Evaluation(
        model=name,
        method=config.method,
        base_model=config.model,
        task=config.task,
        samples=trained.samples,
        max_samples=max_samples,
        chat=trained.loaded.tokenizer.chat_template is not None,
        split=result.get("split"),
        questions=None if predictions is None else len(predictions[1]),
        metrics=result.get("metrics"),
        calibration=None if calibration == Calibration() else asdict(calibration),
        calibrated_since=calibration.task is not None,
        reliability=None if predictions is None else reliability(*predictions),
        risk_coverage=None if predictions is None else coverage_curve(*predictions),
    )


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
    """What answering from a confidence on would give, from the highest confidence down to all questions."""
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


def _read(directory: RunDirectory) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
    if not directory.predictions.exists():
        return None
    _, probabilities, gold = read_predictions(directory.predictions)
    return probabilities, gold


def _or_none(values: Sequence[Any] | NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
