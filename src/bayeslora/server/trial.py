"""Whether a model predicts at all, tried before anybody relies on it.

Weights that are no numbers are refused when a model is loaded. Its predictions can still be none: an adapter has diverged, or a
layer overflows.
"""

from __future__ import annotations

import numpy as np

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import make_item


def require_sound(trained: TrainedModel) -> None:
    """Refuse a model whose predictions are no numbers."""
    try:
        try_out(trained)
    except ArithmeticError as error:
        raise InputError(f"{trained.directory.path}: cannot be served: {error}") from error


def try_out(trained: TrainedModel) -> None:
    """Ask one small question; an ``ArithmeticError`` if its probabilities are no numbers."""
    predictions = trained.predictor()([make_item("Is it?", ["yes", "no"])])
    if not np.isfinite(predictions.probabilities).all():
        raise ArithmeticError("the model's probabilities are not numbers (nan)")
