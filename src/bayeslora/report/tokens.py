"""Saved scores of tokens, of all and of those with the highest entropy under a LoRA; and solutions to problems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayeslora.figures.certainty import draw_confidence
from bayeslora.figures.panel import COLUMN
from bayeslora.figures.reliability import BINS, draw_panels, make_panel
from bayeslora.figures.selective import draw_risk_coverage
from bayeslora.metrics import TokenScores, reliability_bins_from_confidence
from bayeslora.predict.tokens.predictor import TokenPredictions, read_token_predictions, token_metrics
from bayeslora.report.blocks import Drawing, Gallery, Note, Plain, Section
from bayeslora.report.free_answers import answer_section
from bayeslora.report.reading import checking, numbers, require_equal
from bayeslora.report.wording import COT, short
from bayeslora.runs.answer_file import read_answers
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.runs.solving import solving_metrics

_SHOWN = 20
"""Greatest number of solutions to list."""


def token_sections(path: Path, result: RunResult) -> list[Section]:
    """Figures and tables of every split with saved tokens; those of the reported split must match its saved metrics."""
    directory, reported = RunDirectory(path), str(result.split)
    sections = []
    for split in dict.fromkeys((reported, "validation")):
        if not directory.tokens(split).exists():
            continue
        predictions = read_token_predictions(directory.tokens(split))
        with checking(directory.result):
            saved = numbers(result.metrics if split == reported else (result.validation or {})["metrics"])
        require_equal(directory.result, _of_tokens(saved), predictions.metrics())
        sections.append(_section(split, predictions))
    if directory.answers.exists():
        sections.insert(0, answer_section(directory, numbers(result.metrics)))
    if directory.solutions.exists():
        sections.append(_solutions(directory, numbers(result.metrics)))
    return sections


def _of_tokens(saved: Mapping[str, float]) -> dict[str, float]:
    """Metrics of tokens; for problems they have a prefix, since the other metrics are of solutions. Of free answers only the NLL
    is of tokens."""
    if "acc_at_80" in saved:  # of free answers
        return {"nll": saved["nll"]}
    if f"{COT}nll" not in saved:
        return dict(saved)
    return {name.removeprefix(COT): value for name, value in saved.items() if name.startswith(COT)}


def _section(split: str, predictions: TokenPredictions) -> Section:
    parts = {"all tokens": predictions.scores}
    if predictions.uncertain is not None:
        parts["the uncertain 5 %"] = predictions.scores.subset(predictions.uncertain)
    blocks: list[Any] = [_table(split, parts)]
    if predictions.uncertain is None:
        blocks.append(
            Note(
                "The uncertain tokens are those that a LoRA is least sure of. To see them separately, run bayeslora evaluate RUN "
                "--reference LORA_RUN --out DIR, then bayeslora report DIR."
            )
        )
    blocks.append(Gallery(_drawings(split, parts)))
    return Section(f"Tokens, {split} split", blocks)


def _table(split: str, parts: Mapping[str, TokenScores]) -> Plain:
    rows = []
    for name, scores in parts.items():
        figures = token_metrics(scores)
        shown = (figures[it] for it in ("nll", "brier", "ece", "acc", "entropy"))
        rows.append([name, f"{len(scores):,}", *(f"{value:.4f}" for value in shown)])
    return Plain(
        f"tokens-{split}",
        ["", "tokens", "NLL ↓", "Brier ↓", "ECE ↓", "ACC ↑", "entropy"],
        rows,
        f"Every token of the {split} split, in nats per token. The uncertain ones are the 5 % with the highest entropy under a "
        "LoRA; most of the others are nearly certain.",
        numeric=frozenset(range(1, 7)),
    )


def _drawings(split: str, parts: Mapping[str, TokenScores]) -> list[Drawing]:
    drawings = []
    for number, (name, scores) in enumerate(parts.items()):
        bins, figures = reliability_bins_from_confidence(scores.confidence, scores.correct, BINS), token_metrics(scores)
        summary = f"ACC {figures['acc']:.3f}\nNLL {figures['nll']:.3f}\nECE {figures['ece']:.3f}"
        drawings.append(
            Drawing(
                f"reliability-{split}" if number == 0 else f"reliability-{split}-uncertain",
                draw_panels({name: make_panel(bins, summary)}, page=COLUMN),
                f"Reliability of {name}: how often the most probable token was the one that was there.",
                f"Reliability diagram of {name}: accuracy {figures['acc']:.3f} at a mean confidence of "
                f"{figures['confidence']:.3f}, expected calibration error {figures['ece']:.3f}.",
            )
        )
    whole = parts["all tokens"]
    drawings.append(
        Drawing(
            f"risk-coverage-{split}",
            draw_risk_coverage({name: (it.confidence, it.correct) for name, it in parts.items()}),
            "Risk and coverage: errors among the most confident tokens.",
            f"Risk-coverage curve of {', '.join(parts)}; over all tokens {1 - whole.accuracy:.3f} are wrong.",
        )
    )
    drawings.append(
        Drawing(
            f"confidence-{split}",
            draw_confidence(whole.confidence, whole.correct, "tokens"),
            "Confidence where the most probable token was right, and where it was wrong.",
            f"Histogram of confidence over {len(whole)} tokens.",
        )
    )
    return drawings


def _solutions(directory: RunDirectory, saved: Mapping[str, float]) -> Section:
    """Table of solutions, those with a wrong answer first."""
    with checking(directory.solutions):
        records = sorted(read_answers(directory.solutions), key=lambda it: (it["right"], it["id"]))
        rows = [
            [
                str(it["id"]),
                "right" if it["right"] else "wrong",
                short(it["answer"]),
                short(" or ".join(map(str, it["accepted"]))),
                str(it["tokens"]),
            ]
            for it in records[:_SHOWN]
        ]
        again = solving_metrics(records) if records else {}
    require_equal(directory.result, saved, again)
    caption = f"Answers in written solutions, {len(rows)} of {len(records)}, wrong ones first."
    table = Plain("solutions", ["problem", "answer is", "answer", "accepted", "tokens"], rows, caption, frozenset({4}))
    return Section("Solutions", [table])
