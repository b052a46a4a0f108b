"""Checks that the predictions of a model are finite.

Weights that are not finite are refused on loading. Predictions can still be NaN, if an adapter has diverged or a layer overflows.
"""

from __future__ import annotations

import numpy as np

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import make_item


def require_sound(trained: TrainedModel) -> None:
    """Refuse a model whose predictions are not finite."""
    try:
        try_out(trained)
    except ArithmeticError as error:
        raise InputError(f"{trained.directory.path}: cannot be served: {error}") from error


def try_out(trained: TrainedModel) -> None:
    """Predict one small question; raises an ``ArithmeticError`` if its probabilities are not finite."""
    predictions = trained.predictor()([make_item("Is it?", ["yes", "no"])])
    if not np.isfinite(predictions.probabilities).all():
        raise ArithmeticError("the model's probabilities are not finite")
