"""A trained run on a split of a task, as a result of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.files import write_json
from bayeslora.train.config import to_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.environment import describe_environment, peak_memory
from bayeslora.train.run import SCHEMA
from bayeslora.train.trained import TrainedModel


def evaluate(
    trained: TrainedModel, task: str | None, split: str, data_dir: Path | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Metrics on a split as ``result.json`` holds them; with ``out`` they are written there with the predictions."""
    start = time.perf_counter()
    predictions = trained.evaluate(task, split, data_dir)
    seconds = time.perf_counter() - start
    device = trained.model.device
    result = {
        "schema": SCHEMA,
        "config": to_dict(trained.config),
        "environment": describe_environment(device),
        "seed": trained.config.seed,
        "task": task or trained.config.task,
        "split": split,
        "samples": trained.samples,
        "calibration": {
            "temperature": trained.calibration.temperature,
            "posterior_scale": trained.calibration.posterior_scale,
        },
        "metrics": predictions.metrics(),
        "intervals": predictions.intervals(),
        "counts": {split: {"questions": len(predictions.items)}},
        "timing": {"predict_seconds": seconds},
        "memory": {"peak_bytes": peak_memory(device)},
    }
    if out is not None:
        place = RunDirectory(out)
        out.mkdir(parents=True, exist_ok=True)
        predictions.write(place.predictions)
        write_json(place.result, {**result, "predictions": place.predictions.name})
    return result


def require_free(out: Path, *, force: bool) -> None:
    """Refuse to write over an evaluation, or into a run."""
    place = RunDirectory(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose a directory for the evaluation")
    if place.config.exists():
        raise InputError(f"{out}: holds a run; choose another directory for its evaluation")
    if (place.result.exists() or place.predictions.exists()) and not force:
        raise InputError(f"{out}: holds an evaluation already; choose another directory, or use --force to replace it")
