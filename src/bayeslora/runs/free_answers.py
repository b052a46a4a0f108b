"""Free answers: generate them, tell how good they are and how well their confidence knows it, and calibrate that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bayeslora import metrics
from bayeslora.predict.calibrate import Calibration, Unreached
from bayeslora.predict.calibrate.confidence import fit_confidence
from bayeslora.predict.calibrate.threshold import threshold_for
from bayeslora.predict.generation.confidence import FEATURES, AnswerWriter, calibrated_confidence, feature_rows
from bayeslora.runs.generating import BatchedGeneration
from bayeslora.tasks.answers import FreeQuestion, answer_f1, ask_freely, encode_answer, exact_match

MOST_TOKENS = 64
"""Longest answer, in tokens."""

Records = Sequence[Mapping[str, Any]]


def make_answering(writer: AnswerWriter, batch_tokens: int, draws: int) -> BatchedGeneration[FreeQuestion]:
    """Generates an answer with its confidence to every question."""

    def answer(questions: Sequence[FreeQuestion]) -> list[dict[str, Any]]:
        written = writer([ask_freely(question, writer.tokenizer) for question in questions])
        return [
            {
                "id": question.id,
                "question": question.text,
                **answer.to_dict(),
                "tokens": len(answer.generation.token_ids),
                "accepted": list(question.answers),
                "right": exact_match(answer.text, question.answers),
                "f1": answer_f1(answer.text, question.answers),
            }
            for question, answer in zip(questions, written, strict=True)
        ]

    return BatchedGeneration(
        answer,
        lambda question: len(encode_answer(question, writer.tokenizer).prompt_ids),
        draws,
        writer.writing.max_new_tokens,
        batch_tokens,
    )


def answer_metrics(records: Records) -> dict[str, float]:
    """How good answers are, and how well the confidence tells right ones from wrong ones."""
    right = np.array([record["right"] for record in records], dtype=bool)
    confidence = np.array([record["confidence"] for record in records], dtype=np.float64)
    figures = {
        "acc": float(right.mean()),
        "f1": float(np.mean([record["f1"] for record in records])),
        "confidence": float(confidence.mean()),
        "ece": metrics.ece_from_confidence(confidence, right),
        "brier": float(np.square(confidence - right).mean()),
        "aurc": metrics.aurc(confidence, right),
    }
    if 0 < right.sum() < len(right):
        figures["auroc"] = metrics.auroc(confidence, right)
    for share in (0.8, 0.5):
        figures[f"acc_at_{round(100 * share)}"] = metrics.accuracy_at_coverage(confidence, right, share)
    return figures


def answer_reliability(records: Records) -> metrics.ReliabilityBins:
    """How often answers of a confidence are right."""
    right = [bool(record["right"]) for record in records]
    return metrics.reliability_bins_from_confidence([float(record["confidence"]) for record in records], right)


def with_confidence(records: Records, calibration: Calibration) -> list[dict[str, Any]]:
    """Records with another confidence, computed from the same features."""
    assert calibration.confidence is not None
    confidence = calibrated_confidence(calibration.confidence, records)
    return [
        {**record, "confidence": value, "abstains": calibration.threshold is not None and value < calibration.threshold}
        for record, value in zip(records, confidence, strict=True)
    ]


def calibrate_answers(
    records: Records, *, error_rate: float | None = None, coverage: float | None = None
) -> Calibration:
    """Fit the confidence on answers that are known to be right or wrong, and choose a threshold for a target."""
    right = np.array([record["right"] for record in records], dtype=bool)
    found = Calibration(confidence=fit_confidence(FEATURES, feature_rows(records), right), questions=len(records))
    after = with_confidence(records, found)
    warnings = () if 0 < right.sum() < len(right) else (f"all answers are {'right' if right.all() else 'wrong'}",)
    found = replace(found, before=_main(records), after=_main(after), warnings=warnings)
    if error_rate is None and coverage is None:
        return found
    confidence = np.array([record["confidence"] for record in after])
    try:
        threshold = threshold_for(confidence, right, error_rate=error_rate, coverage=coverage)
    except Unreached as error:
        return replace(found, warnings=(*found.warnings, f"there is no threshold: {error}"))
    return replace(found, threshold=threshold.confidence, target=threshold.target)


def _main(records: Records) -> dict[str, float]:
    figures = answer_metrics(records)
    return {name: figures[name] for name in ("acc", "ece", "auroc", "aurc") if name in figures}
