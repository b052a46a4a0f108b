"""A cascade: a model answers the questions it is sure of, and passes the others on to a second one.

The second is any function from questions to the numbers of its choices: another run, a larger model behind an endpoint
(:mod:`bayeslora.remote.expert`), or a person.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.errors import InputError
from bayeslora.metrics.validation import ROW_SUM_TOLERANCE
from bayeslora.number_checks import check_number
from bayeslora.tasks import Item, require_gold
from bayeslora.wording import counted

if TYPE_CHECKING:
    from bayeslora.runs.trained import TrainedModel

Second = Callable[[Sequence[Item]], Sequence[int | None]]
"""Numbers of the chosen options; ``None`` where it has no answer, which counts as wrong."""


@dataclass(frozen=True, kw_only=True)
class CascadeResult:
    """What a cascade is worth on questions with known answers. Accuracies of no questions are ``None``.

    Attributes:
        questions: how many there were.
        threshold: confidence from which on the first model answers.
        answered: share of the questions that it answers.
        accuracy: of the cascade.
        first_accuracy: of the first model on the questions that it answers.
        second_accuracy: of the second model on the others.
        alone: accuracy of the first model if it answered all of them.
        first_seconds: time of the first model per question.
        second_seconds: time of the second model per question that was passed on.
    """

    questions: int
    threshold: float
    answered: float
    accuracy: float
    first_accuracy: float | None
    second_accuracy: float | None
    alone: float
    first_seconds: float
    second_seconds: float | None

    @property
    def seconds(self) -> float:
        """Mean time of the cascade per question."""
        return self.first_seconds + (1 - self.answered) * (self.second_seconds or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "seconds": self.seconds}


def second_run(model: TrainedModel) -> Second:
    """Another run as the second model."""
    return lambda items: [int(choice) for choice in model.predict(items).choices]


def run_cascade(model: TrainedModel, items: Sequence[Item], second: Second, threshold: float) -> CascadeResult:
    """Let the first model answer what it is sure of, and the second one the rest."""
    check_number("threshold", threshold, least=0, most=1 + ROW_SUM_TOLERANCE)
    gold = np.array(require_gold(items))
    start = time.perf_counter()
    predictions = model.predict(items)
    first_seconds = (time.perf_counter() - start) / len(items)
    sure = predictions.probabilities.max(axis=1) >= threshold
    right = predictions.choices == gold
    passed = np.flatnonzero(~sure).tolist()
    start = time.perf_counter()
    said = second([items[row] for row in passed]) if len(passed) else []
    second_seconds = (time.perf_counter() - start) / len(passed) if len(passed) else None
    if len(said) != len(passed):
        raise InputError(
            f"the second model gave {counted(len(said), 'answer')} to {counted(len(passed), 'question')}; give one for each"
        )
    rescued = np.array([choice == gold[row] for row, choice in zip(passed, said, strict=True)], dtype=bool)
    return CascadeResult(
        questions=len(items),
        threshold=threshold,
        answered=float(sure.mean()),
        accuracy=float((right[sure].sum() + rescued.sum()) / len(items)),
        first_accuracy=_mean(right[sure]),
        second_accuracy=_mean(rescued),
        alone=float(right.mean()),
        first_seconds=first_seconds,
        second_seconds=second_seconds,
    )


def cascade_curve(
    confidence: ArrayLike, right: ArrayLike, second_right: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of the questions that the first model answers, and accuracy of the cascade, from passing on all to passing on none.

    Args:
        confidence: of the first model, ``[N]``.
        right: whether its answers are right, ``[N]``.
        second_right: whether those of the second model are, ``[N]``.
    """
    order = np.argsort(-np.asarray(confidence, dtype=np.float64), kind="stable")
    first, other = np.asarray(right, dtype=bool)[order], np.asarray(second_right, dtype=bool)[order]
    correct = np.concatenate([[0], first.cumsum()]) + np.concatenate([other[::-1].cumsum()[::-1], [0]])
    return np.arange(len(first) + 1) / len(first), correct / len(first)


def _mean(values: NDArray[np.bool_]) -> float | None:
    return float(values.mean()) if len(values) else None
