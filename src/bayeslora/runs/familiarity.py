"""Fit how far questions are from those that a run was trained on, at the end of training or of calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeslora.errors import InputError
from bayeslora.metrics import FeatureGaussian, fit_gaussian
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.features import has_features
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.progress import Reporter
from bayeslora.runs.config import PredictionConfig
from bayeslora.runs.split_evaluation import chosen
from bayeslora.tasks import EncodedItem, Item, require_options

if TYPE_CHECKING:
    from bayeslora.runs.trained import TrainedModel

MOST = 2000
"""Most training questions whose features are computed: a pass each, and a file with as many directions at most."""


def with_flag(settings: PredictionConfig, by: str | None, share: float | None) -> PredictionConfig:
    """Settings with another score that decides, or from another share on, where these are given."""
    given: dict[str, Any] = {"unfamiliar_by": by, "unfamiliar_from": share}
    return replace(settings, **{name: value for name, value in given.items() if value is not None})


def fit_familiarity(
    predictor: Predictor,
    train: Sequence[EncodedItem],
    validation: Predictions,
    encoded: Sequence[EncodedItem],
    settings: PredictionConfig,
    report: Reporter,
) -> Familiarity | None:
    """Fit to the features of training questions, with the scores of validation questions beside them.

    Args:
        predictor: of the run.
        train: the training questions, of which at most :data:`MOST` are used.
        validation: predictions of the validation questions, calibrated as those of later questions will be.
        encoded: the validation questions as token ids.
        settings: which score decides, and from which share on.
        report: receives progress reports.
    """
    if settings.unfamiliar_by == "none" or not has_features(predictor.scorer.model):
        return None
    gaussian = _fit_gaussian(predictor, train, report)
    return _familiarity(gaussian, predictor, validation, encoded, settings, report)


def renew_familiarity(
    trained: TrainedModel, items: Sequence[Item], data_dir: Path | None, settings: PredictionConfig
) -> Familiarity | None:
    """Fit again after a calibration, on these held-out questions, and save; ``None`` if it is not wanted or cannot be fitted.

    Features of training questions do not change with the calibration, so they are kept if they were fitted before.
    """
    if settings.unfamiliar_by == "none":
        trained.directory.familiarity.unlink(missing_ok=True)
        return None
    if not has_features(trained.model):
        return None
    predictor, place = replace(trained.predictor(), familiarity=None), trained.directory.familiarity
    gaussian = _kept(place) or _fit_to_own(trained, predictor, data_dir)
    if gaussian is None:
        return None
    encoded = predictor.encode(items)
    found = _familiarity(gaussian, predictor, predictor(items, encoded), encoded, settings, trained.report)
    found.save(place)
    return found


def _kept(place: Path) -> FeatureGaussian | None:
    """What was fitted before; ``None`` if there is nothing, or if it is damaged or of an earlier version."""
    try:
        return Familiarity.load(place).gaussian if place.exists() else None
    except InputError:
        return None


def _fit_to_own(trained: TrainedModel, predictor: Predictor, data_dir: Path | None) -> FeatureGaussian | None:
    """Fit to the training questions of the run's own task, if they can be read."""
    try:
        items = require_options(trained.find_task(None, data_dir)).load("train").items
    except InputError as error:
        trained.report.say(f"distances from the training questions are left out: {error}")
        return None
    used = chosen(chosen(items, trained.config.data.max_train, "max_train"), MOST, "features")
    return None if len(used) < 2 else _fit_gaussian(predictor, predictor.encode(used), trained.report)


def _fit_gaussian(predictor: Predictor, train: Sequence[EncodedItem], report: Reporter) -> FeatureGaussian:
    used = chosen(train, MOST, "features")
    return fit_gaussian(predictor.features(used, report.stage("features of training questions")))


def _familiarity(
    gaussian: FeatureGaussian,
    predictor: Predictor,
    validation: Predictions,
    encoded: Sequence[EncodedItem],
    settings: PredictionConfig,
    report: Reporter,
) -> Familiarity:
    features = predictor.features(encoded, report.stage("features of validation questions"))
    return Familiarity.of(gaussian, validation, settings.unfamiliar_by, settings.unfamiliar_from, features)
