"""Free answers on a page: how far their confidence can be trusted, and the most confident wrong ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bayeslora.figures.certainty import draw_confidence
from bayeslora.figures.panel import COLUMN
from bayeslora.figures.reliability import BINS, draw_panels, make_panel
from bayeslora.figures.selective import draw_risk_coverage
from bayeslora.metrics import reliability_bins_from_confidence
from bayeslora.predict.calibrate import Calibration
from bayeslora.report.blocks import Drawing, Gallery, Note, Plain, Section
from bayeslora.report.reading import checking, require_equal
from bayeslora.report.wording import SHOWN, in_words, short
from bayeslora.runs.answer_file import read_answers
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.free_answers import answer_metrics, with_confidence

Records = Sequence[Mapping[str, Any]]


def answer_section(directory: RunDirectory, saved: Mapping[str, float]) -> Section:
    """Figures of the answers of a run, which must match its saved metrics."""
    with checking(directory.answers):
        records = read_answers(directory.answers)
        again = answer_metrics(records)
    require_equal(directory.result, {name: saved[name] for name in again if name in saved}, again)
    sides: dict[str, Records] = {"as trained": records}
    if directory.calibration.exists():
        calibration = Calibration.load(directory.calibration)
        if calibration.confidence is not None:
            sides["calibrated"] = with_confidence(records, calibration)
    last = list(sides.values())[-1]
    return Section("Answers", [Note(in_words(answer_metrics(last))), Gallery(_drawings(sides)), _wrong(last)])


def _drawings(sides: Mapping[str, Records]) -> list[Drawing]:
    drawings = []
    for name, records in sides.items():
        confidence, right = _outcomes(records)
        figures = answer_metrics(records)
        panel = make_panel(
            reliability_bins_from_confidence(confidence, right, BINS),
            f"ACC {figures['acc']:.3f}\nECE {figures['ece']:.3f}",
        )
        drawings.append(
            Drawing(
                f"reliability-{name.replace(' ', '-')}",
                draw_panels({name: panel}, page=COLUMN),
                f"Reliability of the confidence, {name}: how often answers were right.",
                f"Reliability diagram of the confidence, {name}: right in {figures['acc']:.3f}, mean confidence "
                f"{figures['confidence']:.3f}, expected calibration error {figures['ece']:.3f}.",
            )
        )
    outcomes = {name: _outcomes(records) for name, records in sides.items()}
    drawings.append(
        Drawing(
            "risk-coverage-answers",
            draw_risk_coverage(outcomes),
            "Risk and coverage: errors among the most confident answers.",
            f"Risk-coverage curve of {', '.join(sides)}.",
        )
    )
    confidence, right = list(outcomes.values())[-1]
    drawings.append(
        Drawing(
            "confidence-answers",
            draw_confidence(confidence, right, "answers"),
            "Confidence in right answers and in wrong ones.",
            f"Histogram of the confidence of {len(right)} answers.",
        )
    )
    return drawings


def _outcomes(records: Records) -> tuple[Any, Any]:
    confidence = np.array([record["confidence"] for record in records], dtype=np.float64)
    return confidence, np.array([record["right"] for record in records], dtype=bool)


def _wrong(records: Records) -> Plain:
    """Table of wrong answers, the most confident first."""
    wrong = sorted((it for it in records if not it["right"]), key=lambda it: (-it["confidence"], it["id"]))
    rows = [
        [
            short(it["question"]),
            short(it["answer"]),
            short(" or ".join(map(str, it["accepted"]))),
            f"{it['confidence']:.3f}",
            f"{it['agreement']:.0%}",
        ]
        for it in wrong[:SHOWN]
    ]
    caption = f"Wrong answers, the most confident first: {len(rows)} of {len(wrong)}, among {len(records)} answers."
    columns = ["question", "answer", "accepted", "confidence", "draws that agree"]
    return Plain("wrong-answers", columns, rows, caption, frozenset({3, 4}))
