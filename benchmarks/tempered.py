"""What is left of the differences between methods if every one of them gets a temperature.

python benchmarks/tempered.py STUDY [STUDY ...] --out result.json && python benchmarks/across.py result.json

STUDY is the directory of `bayeslora compare`. Runs keep the predictions of the test questions only, so the temperature is
fitted on one half of those and applied to the other, and the other way round; the halves are the same for all runs. Nothing is
chosen by the outcome.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from records import command, runs_of

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import fit_temperature
from bayeslora.report.reading import read_record
from bayeslora.studies.evaluated import Evaluated

METRICS = {"acc": metrics.accuracy, "nll": metrics.nll, "ece": metrics.ece}


def crossed(probabilities: np.ndarray, gold: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The probabilities at the temperature that fits the half of the questions they do not belong to, and both temperatures."""
    halves = np.array_split(np.random.default_rng(0).permutation(len(gold)), 2)
    scores, found, temperatures = np.log(np.maximum(probabilities, 1e-300)), np.empty_like(probabilities), []
    for mine, other in (halves, halves[::-1]):
        temperature = fit_temperature(scores[other], gold[other])
        powers = np.exp((scores[mine] - scores[mine].max(axis=1, keepdims=True)) / temperature)
        found[mine] = powers / powers.sum(axis=1, keepdims=True)
        temperatures.append(temperature)
    return found, temperatures


def tempered(run: Evaluated) -> dict[str, Any]:
    """Metrics of a run with crossed temperatures."""
    probabilities, temperatures = crossed(run.probabilities, run.gold)
    figures = {name: float(metric(probabilities, run.gold)) for name, metric in METRICS.items()}
    return {"seed": run.seed, "temperatures": temperatures, "metrics": figures}


def section(study: Path, record: Mapping[str, Any], task: str) -> dict[str, Any]:
    """All methods of a task whose runs are complete, in the form of a comparison's record."""
    found = {method: runs_of(study, record, task, method) for method in record["study"]["methods"]}
    return {
        method: {"runs": [tempered(run) for run in runs], "ties_best": {}}
        for method, runs in found.items()
        if len(runs) == len(record["study"]["seeds"])
    }


def main() -> None:
    """Compute and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    sections = {}
    for study in given.studies:
        record = read_record(study / "table.json")
        for task in record["study"]["tasks"]:
            if task in sections:
                raise InputError(f"{study}: has {task}, as has a study before it; give one for each task")
            sections[task] = section(study, record, task)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"schema": 1, "sections": sections}, separators=(",", ":")) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    command(main)
