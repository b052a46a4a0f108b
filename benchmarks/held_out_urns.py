"""How close runs on ``urns`` come to the true probabilities of held-out urns, on which settings may be chosen.

python benchmarks/held_out_urns.py RUN [RUN ...] --urns 300 --out validation.json

The urns are of the validation split. Since their probabilities are known, the expected NLL and accuracy are exact: no answer is
drawn. Predictions are as trained, without calibration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import command

from bayeslora import load_run
from bayeslora.atomic_files import write_json
from bayeslora.models import load_model
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.runs.environment import describe_environment
from bayeslora.tasks import Item
from bayeslora.tasks.urns import distance_to_truth, make_urns, truth_entropy


def against_truth(predictions: Predictions) -> dict[str, float]:
    """Expected NLL and accuracy, mean confidence, and distance to the true probabilities."""
    found = predictions.probabilities
    truth = np.zeros_like(found)
    for row, item in enumerate(predictions.items):
        truth[row, : len(item.options)] = item.probabilities
    return {
        "expected_nll": float(-(truth * np.log(np.where(truth > 0, found, 1))).sum(1).mean()),
        "expected_acc": float(truth[np.arange(len(found)), predictions.choices].mean()),
        "confidence": float(found.max(1).mean()),
        "distance_to_truth": distance_to_truth(found.tolist(), predictions.items),
    }


def measure(runs: Sequence[Path], urns: Sequence[Item]) -> list[dict[str, Any]]:
    """A row for every run, with its settings."""
    rows, loaded = [], load_model("smollm2")
    for run in runs:
        trained = load_run(run, raw=True, loaded=loaded)
        config = trained.config
        row: dict[str, Any] = {"method": config.method, "preset": config.preset, "settings": config.adapter.settings}
        row |= {"epochs": config.training.epochs, "seed": config.seed, **against_truth(trained.predict(urns))}
        trained.model.unload()
        print(f"{run}: {row['expected_nll']:.4f}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Predict, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="finished runs on the task urns")
    parser.add_argument("--urns", type=int, default=300, help="number of held-out urns")
    parser.add_argument("--out", type=Path, required=True, help="file of the record")
    given = parser.parse_args()
    urns = make_urns("validation", given.urns)
    record = {"urns": len(urns), "truth_entropy": truth_entropy(urns), "runs": measure(given.runs, urns)}
    write_json(given.out, {**record, "environment": describe_environment(torch.device("cpu"))})


if __name__ == "__main__":
    command(main)
