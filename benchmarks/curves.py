"""Reliability and risk–coverage of the runs of a comparison, all tasks and seeds together.

python benchmarks/curves.py STUDY --methods lora deep-ensemble bayesian-lora --out curves.json

STUDY is the directory of `bayeslora compare`. Every question of every run counts once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import command, runs_of

from bayeslora import metrics
from bayeslora.report.reading import read_record
from bayeslora.studies.evaluated import Evaluated

BINS, POINTS = 10, 50


def answered(runs: Iterable[Evaluated], calibrated: bool) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Confidence of all answers, and whether they are right."""
    confidence, right = [], []
    for run in runs:
        probabilities = run.calibrated if calibrated and run.calibrated is not None else run.probabilities
        confidence.append(probabilities.max(axis=1))
        right.append(probabilities.argmax(axis=1) == run.gold)
    return np.concatenate(confidence), np.concatenate(right)


def curves(confidence: NDArray[np.float64], right: NDArray[np.bool_]) -> dict[str, Any]:
    """Bins of the reliability diagram, and the share of wrong answers among the surest."""
    bins = metrics.reliability_bins_from_confidence(confidence, right, BINS)
    risk = metrics.risk_coverage(confidence, right)
    shares = np.linspace(1 / POINTS, 1, POINTS)
    rounded = {name: [numbered(it) for it in getattr(bins, name)] for name in ("count", "confidence", "accuracy")}
    return {
        "answers": len(right),
        "ece": metrics.ece_from_confidence(confidence, right),
        "aurc": metrics.aurc(confidence, right),
        "bins": rounded,
        "coverage": np.round(shares, 3).tolist(),
        "risk": np.round(np.interp(shares, risk.coverage, risk.risk), 5).tolist(),
    }


def numbered(value: float) -> float | None:
    """A number of a record; none for that of a bin without answers."""
    return None if np.isnan(value) else round(float(value), 5)


def gather(study: Path, methods: Sequence[str]) -> dict[str, Any]:
    """The curves of all methods, before and after calibration."""
    record = read_record(study / "table.json")
    found = {}
    for method in methods:
        runs = [run for task in record["study"]["tasks"] for run in runs_of(study, record, task, method)]
        found[method] = {
            "runs": len(runs),
            "raw": curves(*answered(runs, calibrated=False)),
            "calibrated": curves(*answered(runs, calibrated=True)),
        }
    return {"schema": 1, "study": record["study"], "environment": record["environment"], "methods": found}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    record = gather(given.study, given.methods)
    given.out.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
