"""Predictions as answers: the chosen option, the confidence, the kinds of uncertainty, and whether to abstain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.data_frames import Results, make_frame, quoted
from bayeslora.metrics import entropy
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.predictions import Predictions

if TYPE_CHECKING:
    from pandas import DataFrame


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
        agreement: share of the draws that choose the same option by themselves.
        semantic_entropy: entropy over the options that the draws choose, in nats.
        prediction_set: options that contain the right one with the chosen probability; ``None`` without calibration.
        distance: share of the validation questions that are nearer to the training questions than this one is; ``None`` if
            that was not fitted.
        unfamiliar: whether the question is unlike those of training, by the score that the run is set to.
    """

    answer: str | None
    confidence: float
    choices: tuple[str, ...]
    probabilities: tuple[float, ...]
    entropy: float
    aleatoric: float
    epistemic: float
    abstains: bool
    agreement: float = 1.0
    semantic_entropy: float = 0.0
    prediction_set: tuple[str, ...] | None = None
    distance: float | None = None
    unfamiliar: bool | None = None

    def __repr__(self) -> str:
        said = "abstains" if self.answer is None else quoted(self.answer)
        doubt = f"epistemic {self.epistemic:.3f} of {self.entropy:.3f} nats"
        return f"Answer({said}, confidence {self.confidence:.3f}, {doubt})"

    def to_row(self) -> dict[str, Any]:
        """Its cells in a table of answers."""
        return asdict(self)

    def to_pandas(self) -> DataFrame:
        """A table with one row per option: ``choice``, ``probability`` and, if calibrated, whether it is ``in_set``."""
        rows: list[dict[str, Any]] = [
            {"choice": choice, "probability": p} for choice, p in zip(self.choices, self.probabilities, strict=True)
        ]
        if self.prediction_set is not None:
            rows = [{**row, "in_set": row["choice"] in self.prediction_set} for row in rows]
        return make_frame(rows)


def make_answers(
    predictions: Predictions, calibration: Calibration, level: float = 0.9, familiarity: Familiarity | None = None
) -> Results[Answer]:
    """Make one answer per question, with threshold and prediction sets from the calibration."""
    probabilities = predictions.probabilities
    abstains = calibration.abstains(probabilities)
    total = predictions.entropies
    epistemic = np.zeros_like(total) if predictions.epistemic is None else predictions.epistemic
    present = np.arange(probabilities.shape[1]) < np.array([[len(item.options)] for item in predictions.items])
    votes = _votes(predictions)
    voted = entropy(votes)
    sets = calibration.prediction_sets(probabilities, level, present) if calibration.conformal else None
    distances, unfamiliar = _familiar(predictions, familiarity)
    answers: Results[Answer] = Results()
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
                agreement=float(votes[row, predictions.choices[row]]),
                semantic_entropy=float(voted[row]),
                prediction_set=None if sets is None else tuple(c for k, c in enumerate(choices) if sets[row, k]),
                distance=distances[row],
                unfamiliar=unfamiliar[row],
            )
        )
    return answers


def _familiar(
    predictions: Predictions, familiarity: Familiarity | None
) -> tuple[Sequence[float | None], Sequence[bool | None]]:
    """For each question its distance as a share, and whether it is unfamiliar."""
    unknown = [None] * len(predictions.items)
    if familiarity is None or predictions.distances is None:
        return unknown, unknown
    shares = familiarity.shares("distance", predictions.distances)
    return shares.tolist(), familiarity.unfamiliar(predictions).tolist()


def _votes(predictions: Predictions) -> NDArray[np.float64]:
    """``[N, O]``, share of the draws that choose each option by themselves; without draws the choice has all of them."""
    options = np.arange(predictions.probabilities.shape[1])
    if predictions.draws is None:
        return (predictions.choices[:, None] == options).astype(np.float64)
    return np.asarray((predictions.draws.argmax(axis=-1)[..., None] == options).mean(axis=0))
