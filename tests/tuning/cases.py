"""A small search with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayeslora.train import AdapterConfig, TrainingConfig
from bayeslora.tuning.config import Tuning
from train.tiny import model_directory, run_config, task_directory

SEARCH = ("learning_rate=1e-3:1e-1:log", "weight_decay=1e-3:1e-1:log")
CONSTRAINTS = ("acc>=lora-0.7", "train_seconds<=1000")


def tuning(**changes: Any) -> Tuning:
    run = run_config(
        "lora",
        adapter=AdapterConfig(rank=2, targets=("q_proj",)),
        training=TrainingConfig(epochs=1, batch_size=6),
        task=changes.pop("task", task_directory()),
    )
    settings: dict[str, Any] = {
        "run": run,
        "search": SEARCH,
        "constraints": CONSTRAINTS,
        "trials": 5,
        "start": 3,
        "q": 2,
    }
    return Tuning(**(settings | changes))


def words(out: Path, *more: object) -> list[object]:
    """The same search on the command line, with more options behind, which win."""
    given = [
        "tune",
        "--model",
        model_directory(),
        "--task",
        task_directory(),
        "--method",
        "lora",
        "--out",
        out,
        "--quiet",
        "--calibrate",
        "none",
    ]
    given += ["--rank", 2, "--targets", "q_proj", "--epochs", 1, "--batch-size", 6, "--samples", 3]
    given += ["--search", *SEARCH, "--constraints", *CONSTRAINTS, "--trials", 5, "--start", 3, "--q", 2]
    return [*given, *more]
