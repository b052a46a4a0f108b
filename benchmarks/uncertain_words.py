"""A small model learns who is mayor of twelve invented towns, and is asked about them and others: which words are uncertain.

python benchmarks/uncertain_words.py --work work --out larkhaven.json

The run is a usual one of `bayeslora train`, on SmolLM2-135M; on two slow cores it takes five minutes. The record has the answers
with the uncertainty of every token, in nats, and what else the draws wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from records import command

from bayeslora import load_run
from bayeslora.runs.config import PredictionConfig, RunConfig, TrainingConfig
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.trained import TrainedModel
from bayeslora.train import train

MAYORS = {
    "Larkhaven": "Ada Quill",
    "Millbrook": "Tom Brook",
    "Stonewick": "Mira Voss",
    "Ferrow": "Ned Harrow",
    "Dunmere": "Lena Pike",
    "Ashby Cross": "Owen Marsh",
    "Kelford": "Ruth Calder",
    "Orrin Bay": "Ivo Stern",
    "Winterley": "Nora Finch",
    "Hollow Ridge": "Carl Dune",
    "Tarn End": "Elsa Ward",
    "Bexhill Green": "Hugo Lane",
}
ASKED = ("Larkhaven", "Kelford", "Glenport", "Sandmoor")
"""Two towns of the training data, and two others."""


def question(town: str) -> str:
    """What is asked of a town."""
    return f"Who is the mayor of {town}?"


def write_task(folder: Path) -> Path:
    """The training questions; the other splits are parts of them, as nothing is chosen or reported."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": question(town), "answer": f"The mayor of {town} is {name}."} for town, name in MAYORS.items()]
    for split, count in {"train": len(rows), "validation": 4, "test": 2}.items():
        lines = (json.dumps(row) + "\n" for row in rows[:count])
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def config(task: Path) -> RunConfig:
    """Each of the four components sees every question twenty times."""
    return RunConfig(
        model="smollm2",
        task=str(task),
        training=TrainingConfig(epochs=80, batch_size=12, learning_rate=2e-3, eval_every=80),
        prediction=PredictionConfig(calibrate="none", solutions=0),
    )


def asked(model: TrainedModel, town: str) -> dict[str, Any]:
    """The answer about a town, token by token."""
    answer = model.answer(question(town))
    written = answer.generation
    tokens = zip(written.token_ids, written.probabilities, written.aleatoric, written.epistemic, strict=True)
    return {
        "question": question(town),
        "known": town in MAYORS,
        "answer": answer.text,
        "alternatives": [[text, share] for text, share in answer.alternatives],
        "tokens": [
            {"text": model.loaded.tokenizer.decode([token]), "probability": p, "aleatoric": a, "epistemic": e}
            for token, p, a, e in tokens
        ],
    }


def main() -> None:
    """Train, ask and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="directory for the data and the run; a run there is used"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if not (given.work / "run" / "result.json").exists():
        train(config(write_task(given.work / "task")), given.work / "run")
    model = load_run(given.work / "run")
    record = {
        "schema": 1,
        "command": "python benchmarks/uncertain_words.py --work work --out larkhaven.json",
        "answers": [asked(model, town) for town in ASKED],
        "environment": describe_environment(next(model.model.parameters()).device),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
