"""Predictions as answers: what was chosen, how sure the model is, why it is not, and whether it should keep quiet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bayeslora.metrics import entropy
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.predictions import Predictions


@dataclass(frozen=True)
class Answer:
    """What the model thinks of one question.

    Attributes:
        answer: the chosen option, or nothing if the model is not sure enough.
        confidence: probability of the most probable option.
        choices: the options.
        probabilities: of the options, averaged over the draws.
        entropy: how unsure the model is, in nats.
        aleatoric: the part of it that is in every draw, on average.
        epistemic: the part of it that lies between the draws: how far they disagree. Draws that agree may all be wrong.
        abstains: whether the confidence is below the threshold that calibration chose.
        prediction_set: options among which the right one is with the wanted probability; nothing without calibration.
    """

    answer: str | None
    confidence: float
    choices: tuple[str, ...]
    probabilities: tuple[float, ...]
    entropy: float
    aleatoric: float
    epistemic: float
    abstains: bool
    prediction_set: tuple[str, ...] | None = None


def make_answers(predictions: Predictions, calibration: Calibration, level: float = 0.9) -> list[Answer]:
    """Predictions as answers, one by one, by what calibration has chosen."""
    probabilities = predictions.probabilities
    abstains = calibration.abstains(probabilities)
    total = entropy(probabilities)
    epistemic = np.zeros_like(total) if predictions.epistemic is None else predictions.epistemic
    present = np.arange(probabilities.shape[1]) < np.array([[len(item.options)] for item in predictions.items])
    sets = calibration.prediction_sets(probabilities, level, present) if calibration.conformal else None
    answers = []
    for row, item in enumerate(predictions.items):
        choices = tuple(option.strip() for option in item.options)
        answers.append(
            Answer(
                answer=None if abstains[row] else choices[predictions.choices[row]],
                confidence=float(probabilities[row].max()),
                choices=choices,
                probabilities=tuple(probabilities[row, : len(choices)].tolist()),
                entropy=float(total[row]),
                aleatoric=float(total[row] - epistemic[row]),
                epistemic=float(epistemic[row]),
                abstains=bool(abstains[row]),
                prediction_set=None if sets is None else tuple(c for k, c in enumerate(choices) if sets[row, k]),
            )
        )
    return answers
