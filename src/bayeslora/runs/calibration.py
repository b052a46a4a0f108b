"""Choose the calibration of a trained run on held-out questions, and keep it with the adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from peft import PeftModel
from peft.utils import CONFIG_NAME

from bayeslora.atomic_files import replacing
from bayeslora.predict.calibrate import DEFAULT_SCALES, Calibration, Unreached, choose_threshold
from bayeslora.predict.calibrate.fit import calibrate, scale_of, set_scale
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.progress import Advance
from bayeslora.runs.adapters import is_plain
from bayeslora.runs.directory import RunDirectory
from bayeslora.tasks import Item, require_gold


def choose_calibration(
    predictor: Predictor,
    items: Sequence[Item],
    *,
    error_rate: float | None = None,
    coverage: float | None = None,
    tolerance: float | None = None,
    advance: Advance | None = None,
) -> Calibration:
    """Choose posterior scale, temperature and, for a target error rate or coverage, the threshold.

    The model is left at the chosen scale, or at its own if something fails. If no threshold reaches the target, it is left out
    and ``warnings`` say so. With a ``tolerance``, draws differ in as few upper layers as cost at most that much NLL.
    """
    model = predictor.scorer.model
    encoded, before = predictor.encode(items), scale_of(model)
    try:
        found, predictions = calibrate(
            predictor, items, encoded, scales=DEFAULT_SCALES, tolerance=tolerance, advance=advance
        )
        if error_rate is None and coverage is None:
            return found
        return _with_threshold(found, predictions, error_rate, coverage)
    except BaseException:
        set_scale(model, before)
        raise


def save_calibration(calibration: Calibration, model: PeftModel, directory: RunDirectory) -> None:
    """Save the calibration with the adapter, and the scale in the adapter itself, where PEFT loads it."""
    if not is_plain(directory):  # a plain LoRA has no scale, and stays as PEFT wrote it
        with replacing(directory.adapter / CONFIG_NAME) as partial, TemporaryDirectory() as folder:
            model.peft_config["default"].save_pretrained(folder)
            partial.write_bytes((Path(folder) / CONFIG_NAME).read_bytes())
    calibration.save(directory.calibration)


def calibration_of_method(directory: RunDirectory) -> Calibration:
    """The calibration that belongs to the run's method itself: the temperature of ``temperature``."""
    found = (directory.read_result().found or {}) if directory.result.exists() else {}
    return Calibration(temperature=found.get("temperature", 1.0))


def _with_threshold(
    found: Calibration, predictions: Predictions, error_rate: float | None, coverage: float | None
) -> Calibration:
    """Add a threshold to the calibration; if none reaches the target, add a warning instead."""
    gold = np.array(require_gold(predictions.items))
    try:
        chosen = choose_threshold(predictions.probabilities, gold, error_rate=error_rate, coverage=coverage)
    except Unreached as error:
        return replace(found, warnings=(*found.warnings, f"there is no threshold: {error}"))
    return replace(found, threshold=chosen.confidence, target=chosen.target)
