"""Predictions as answers: the chosen option, the confidence, the kinds of uncertainty, and whether to abstain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bayeslora.metrics import entropy
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.predictions import Predictions


@dataclass(frozen=True)
class Answer:
    """The model's answer to one question.

    Attributes:
        answer: the chosen option, or ``None`` if the model abstains.
        confidence: probability of the most probable option.
        choices: the options.
        probabilities: of the options, averaged over the draws.
        entropy: predictive entropy, in nats.
        aleatoric: mean entropy of the draws.
        epistemic: the rest of the entropy, the disagreement between draws. Draws that agree may all be wrong.
        abstains: whether the confidence is below the calibrated threshold.
        prediction_set: options that contain the right one with the chosen probability; ``None`` without calibration.
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
    """Make one answer per question, with threshold and prediction sets from the calibration."""
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
