"""Calibrate a model on questions with answers, and predict with and without calibration.

The draws of each scale are scored once and cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bayeslora.adapter import BayesLoraModel
from bayeslora.adapter.base import find_any_holder
from bayeslora.predict.calibrate import (
    PRIOR_SD,
    Calibration,
    choose_cut,
    choose_scale,
    conformal_thresholds,
    describe_doubts,
    fit_temperature,
)
from bayeslora.predict.questions.predictions import Predictions, main_metrics
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.predict.questions.scorer import DrawScores
from bayeslora.predict.questions.scores import linearised_posterior
from bayeslora.progress import Advance
from bayeslora.tasks import EncodedItem, Item, require_gold

FEW_SCALES = (0.5, 1.0, 2.0)
"""Scales tried at the end of training: each costs as much as one validation."""


def tuner_of(model: nn.Module) -> BayesLoraModel | None:
    """The tuner that has the posterior scale; ``None`` for PEFT's own adapters."""
    tuner = getattr(model, "base_model", None)
    return tuner if isinstance(tuner, BayesLoraModel) else None


def scale_of(model: nn.Module) -> float:
    """Posterior scale, the factor of every standard deviation; 1 for PEFT's own adapters."""
    tuner = tuner_of(model)
    return 1.0 if tuner is None else tuner.posterior_scale


def set_scale(model: nn.Module, scale: float) -> None:
    """Set the posterior scale, if there is one."""
    tuner = tuner_of(model)
    if tuner is not None:
        tuner.posterior_scale = scale


def calibrate(
    predictor: Predictor,
    items: Sequence[Item],
    encoded: Sequence[EncodedItem],
    *,
    scales: Iterable[float],
    tolerance: float | None = None,
    advance: Advance | None = None,
) -> tuple[Calibration, Predictions]:
    """Calibrate; returns the calibration and the calibrated predictions of the same questions.

    Layers and scale are chosen first, then the temperature, then prediction sets: each affects the next. The model is left
    at the chosen scale.

    Args:
        predictor: the predictor; its own calibration is ignored.
        items: held-out questions with answers.
        encoded: the same questions as token ids.
        scales: candidate scales, if the posterior is not a point.
        tolerance: let draws differ in as few upper layers as cost at most this much NLL.
        advance: progress callback, called after every scale (or cut).
    """
    plain = replace(predictor, calibration=Calibration())
    return _Calibrating(plain, items, encoded).run(tuple(scales), tolerance, advance)


def predict_both(
    predictor: Predictor,
    items: Sequence[Item],
    encoded: Sequence[EncodedItem],
    calibration: Calibration | None,
    advance: Advance | None = None,
) -> tuple[Predictions, Predictions | None]:
    """Predictions with the predictor's own calibration and, if another is given, with that. The model is left at the scale of
    the last."""
    model = predictor.scorer.model
    set_scale(model, predictor.calibration.posterior_scale)
    scores = predictor.score(encoded, advance)
    raw = predictor.predictions(items, scores)
    if calibration is None:
        return predictor.with_distances(encoded, raw)[0], None
    after = replace(predictor, calibration=calibration).with_draws(layers=calibration.draw_layers)
    set_scale(model, calibration.posterior_scale)
    same = calibration.posterior_scale == predictor.calibration.posterior_scale
    if not (same and after.sampling == predictor.sampling):
        scores = after.score(encoded, advance)
    one, other = predictor.with_distances(encoded, raw, after.predictions(items, scores))
    return one, other


@dataclass
class _Calibrating:
    predictor: Predictor
    items: Sequence[Item]
    encoded: Sequence[EncodedItem]

    def __post_init__(self) -> None:
        self.gold = np.array(require_gold(self.items))
        self.scored: dict[tuple[str, float], DrawScores] = {}

    def run(
        self, scales: Sequence[float], tolerance: float | None, advance: Advance | None
    ) -> tuple[Calibration, Predictions]:
        layers = self.predictor.sampling.layers
        before = self.predictions(Calibration(draw_layers=layers))
        layers, scale = self.choose(layers, scales if self.can_be_scaled() else (1.0,), tolerance, advance)
        temperature = fit_temperature(self.scores(layers, scale), self.gold, PRIOR_SD)
        found = Calibration(
            temperature=temperature, posterior_scale=scale, draw_layers=layers, questions=len(self.items)
        )
        after = self.predictions(found)
        set_scale(self.predictor.scorer.model, scale)
        found = replace(
            found,
            samples=self.predictor.sampling.samples or None,
            conformal=conformal_thresholds(after.probabilities, self.gold),
            before=main_metrics(before.metrics()),
            after=main_metrics(after.metrics()),
        )
        return replace(found, warnings=describe_doubts(found)), after

    def choose(
        self, layers: str, scales: Sequence[float], tolerance: float | None, advance: Advance | None
    ) -> tuple[str, float]:
        if not self.is_spread(layers):
            return layers, 1.0
        if tolerance is None:
            return layers, choose_scale(lambda scale: self.scores(layers, scale), self.gold, scales, advance).scale
        cut = choose_cut(self.scores, self.gold, tolerance, scales, advance)
        return cut.layers, cut.scale

    def can_be_scaled(self) -> bool:
        tuner = tuner_of(self.predictor.scorer.model)
        return tuner is not None and any(tuner.holder.posterior(name).spread == "width" for name in tuner.holder.active)

    def is_spread(self, layers: str) -> bool:
        """Whether predictions have spread: from several draws or in closed form."""
        if tuner_of(self.predictor.scorer.model) is None or not self.predictor.sampling.samples:
            return False
        several = len(self.draws(layers, 1.0).log_probabilities) > 1
        return several or linearised_posterior(find_any_holder(self.predictor.scorer.model)) is not None

    def predictions(self, calibration: Calibration) -> Predictions:
        scores = self.draws(calibration.draw_layers, calibration.posterior_scale)
        return replace(self.predictor, calibration=calibration).predictions(self.items, scores)

    def scores(self, layers: str, scale: float) -> NDArray[np.float64]:
        return self.draws(layers, scale).predictive

    def draws(self, layers: str, scale: float) -> DrawScores:
        """Scores of the draws, cached on first use."""
        if (layers, scale) not in self.scored:
            set_scale(self.predictor.scorer.model, scale)
            self.scored[layers, scale] = self.predictor.with_draws(layers=layers).score(self.encoded)
        return self.scored[layers, scale]
