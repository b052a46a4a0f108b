"""Saved predictions of questions: read, checked against the saved metrics, and plotted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bayeslora import metrics
from bayeslora.figures.certainty import draw_confidence, draw_epistemic
from bayeslora.figures.panel import COLUMN
from bayeslora.figures.reliability import draw_reliability
from bayeslora.figures.selective import draw_risk_coverage
from bayeslora.predict.questions.predictions import read_choices, read_epistemic, read_mistakes, read_predictions
from bayeslora.report.blocks import Drawing, Plain
from bayeslora.report.reading import checking, require_equal
from bayeslora.report.wording import SHOWN, short
from bayeslora.runs.directory import RunDirectory

FEWEST_OF_EACH = 10
"""Least number of right and of wrong answers for a meaningful AUROC."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Saved answers.

    Attributes:
        ids: of the questions.
        probabilities: ``[N, O]``.
        gold: ``[N]``, right options.
        choices: ``[N]``, chosen options.
        epistemic: ``[N]``, epistemic uncertainty; all 0 without draws.
    """

    ids: list[str]
    probabilities: NDArray[np.float64]
    gold: NDArray[np.int64]
    choices: NDArray[np.int64]
    epistemic: NDArray[np.float64]

    @property
    def confidence(self) -> NDArray[np.float64]:
        """Largest probabilities."""
        return np.asarray(self.probabilities.max(axis=1))

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Which answers are right."""
        return np.asarray(self.choices == self.gold)

    def metrics(self) -> dict[str, float]:
        """Recompute the metrics that do not need the questions."""
        p, gold = self.probabilities, self.gold
        return {
            "acc": float(self.correct.mean()),
            "nll": metrics.nll(p, gold),
            "ece": metrics.ece(p, gold),
            "brier": metrics.brier(p, gold),
            "adaptive_ece": metrics.adaptive_ece(p, gold),
            "mce": metrics.reliability_bins(p, gold).mce,
            "aurc": metrics.aurc(self.confidence, self.correct),
            "confidence": float(self.confidence.mean()),
            "entropy": float(metrics.entropy(p).mean()),
            "epistemic": float(self.epistemic.mean()),
        }


def read_answers(path: Path, saved: dict[str, float], *, calibrated: bool = False) -> Answers:
    """Read the predictions of a run, which must reproduce the ``saved`` metrics."""
    directory = RunDirectory(path)
    place = directory.calibrated if calibrated else directory.predictions
    with checking(place):
        ids, probabilities, gold = read_predictions(place)
        choices = read_choices(place)
        drawn = "epistemic" in saved
        epistemic = read_epistemic(place) if drawn else np.zeros(len(ids))
        answers = Answers(ids, probabilities, gold, choices, epistemic)
        again = answers.metrics()
    require_equal(directory.result, saved, again)
    return answers


def answer_drawings(answers: Answers, calibrated: Answers | None = None) -> list[Drawing]:
    """Figures of calibration, before and after calibrating, and of selective prediction."""
    again = answers.metrics()
    drawings = [
        _reliability(
            "reliability",
            answers,
            "Reliability: how often answers of a given confidence are right. Hatched gaps, weighted by the number of answers "
            "below, add up to the ECE; a gap above its bar is overconfidence.",
        ),
        *([] if calibrated is None else [_reliability("calibrated", calibrated, "The same after calibration.")]),
        Drawing(
            "risk-coverage",
            draw_risk_coverage({"this run": (answers.confidence, answers.correct)}),
            f"Risk and coverage: errors among the most confident answers. Area under the curve (AURC): {again['aurc']:.4f}.",
            f"Risk-coverage curve: {_risks(answers)}.",
        ),
        Drawing(
            "confidence",
            draw_confidence(answers.confidence, answers.correct),
            "Confidence of right and of wrong answers. Wrong answers far to the right were given with high confidence.",
            f"Histogram of confidence: mean {_mean(answers.confidence, answers.correct)}.",
        ),
    ]
    if answers.epistemic.any():
        drawings.append(_epistemic(answers))
    return drawings


def mistakes_table(path: Path) -> list[Plain]:
    """Table of wrong answers, the most confident first; none if the file has no questions."""
    mistakes = read_mistakes(path)
    if not mistakes:
        return []
    rows = [[short(it.question), short(it.chosen), short(it.right), f"{it.confidence:.3f}"] for it in mistakes[:SHOWN]]
    caption = f"Wrong answers, the most confident first: {len(rows)} of {len(mistakes)}."
    return [Plain("mistakes", ["question", "answer", "right answer", "confidence"], rows, caption, frozenset({3}))]


def _reliability(name: str, answers: Answers, caption: str) -> Drawing:
    again = answers.metrics()
    return Drawing(
        name,
        draw_reliability({"": (answers.probabilities, answers.gold)}, page=COLUMN),
        caption,
        f"Reliability diagram of {len(answers.gold)} answers: accuracy {again['acc']:.3f} at a mean confidence of "
        f"{again['confidence']:.3f}, expected calibration error {again['ece']:.3f}.",
    )


def _epistemic(answers: Answers) -> Drawing:
    wrong = ~answers.correct
    counts = f"{wrong.sum()} wrong and {answers.correct.sum()} right answers"
    told = f" {counts} are too few to say how well it tells them apart."
    if min(wrong.sum(), answers.correct.sum()) >= FEWEST_OF_EACH:
        auroc = metrics.auroc(answers.epistemic, wrong)
        told = f" It tells {counts} apart with an AUROC of {auroc:.3f} (0.5 means not at all)."
    return Drawing(
        "epistemic",
        draw_epistemic(answers.epistemic, answers.correct),
        f"Epistemic uncertainty: how much the weight draws disagree.{told}",
        f"Histogram of epistemic uncertainty in nats: mean {_mean(answers.epistemic, answers.correct)}.{told}",
    )


def _risks(answers: Answers) -> str:
    shares = (
        (share, metrics.accuracy_at_coverage(answers.confidence, answers.correct, share)) for share in (0.25, 0.5, 1)
    )
    return ", ".join(f"{1 - accuracy:.3f} wrong among the most confident {share:.0%}" for share, accuracy in shares)


def _mean(values: NDArray[Any], correct: NDArray[np.bool_]) -> str:
    kinds = (("right", values[correct]), ("wrong", values[~correct]))
    return " and ".join(f"{some.mean():.3f} where {kind}" for kind, some in kinds if len(some))
