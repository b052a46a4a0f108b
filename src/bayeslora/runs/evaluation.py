"""A trained run on a split of a task, as a result of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.runs.config import to_dict
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.environment import describe_environment, peak_memory
from bayeslora.runs.judging import SCHEMA, Judged, TokenJudge, judge_questions, read_reference, require_judgeable
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Task, TokenTask, find_task


def evaluate(
    trained: TrainedModel,
    task: str | None,
    split: str,
    data_dir: Path | None = None,
    out: Path | None = None,
    reference: Path | None = None,
) -> dict[str, Any]:
    """Metrics on a split as ``result.json`` holds them; with ``out`` they are written there with the predictions.

    Those of a run that is calibrated are told as it was trained, and after calibration under ``calibrated``.

    For tasks whose every token is predicted, ``reference`` is the directory of a LoRA's run whose entropies say which tokens
    are uncertain.
    """
    start = time.perf_counter()
    name = task or trained.config.task
    judged, counts = _judge(trained, find_task(name, data_dir), split, out, reference)
    seconds = time.perf_counter() - start
    device = trained.model.device
    result = {
        "schema": SCHEMA,
        "config": to_dict(trained.config),
        "environment": describe_environment(device),
        "seed": trained.config.seed,
        "task": name,
        "split": split,
        "samples": trained.samples,
        "draw_layers": trained.draw_layers,
        "calibration": {
            "temperature": trained.calibration.temperature,
            "posterior_scale": trained.calibration.posterior_scale,
        },
        "metrics": judged.metrics,
        "intervals": judged.intervals,
        "counts": {split: counts},
        "timing": {"predict_seconds": seconds},
        "memory": {"peak_bytes": peak_memory(device)},
        **({} if reference is None else {"reference": str(reference)}),
        **judged.more,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        judged.write(RunDirectory(out))
        write_json(RunDirectory(out).result, result)
    return result


def _judge(
    trained: TrainedModel, task: Task | TokenTask, split: str, out: Path | None, reference: Path | None
) -> tuple[Judged, dict[str, int]]:
    """Figures, and how much there was of what they are about."""
    if isinstance(task, Task):
        if reference is not None:
            raise InputError(f"reference belongs to tasks of text, and task {task.name!r} has questions; leave it out")
        raw, calibrated = trained.predict_task_both(task, split)
        return judge_questions(raw, calibrated, trained.calibration), {"questions": len(raw.items)}
    require_judgeable(trained.config, task, trained.samples)
    if reference is not None:
        read_reference(reference, split)  # refused now rather than when all is computed
    texts = task.encode(split, trained.loaded.tokenizer, trained.config.data.max_tokens)
    judge = TokenJudge(trained.config, trained.model, trained.loaded, trained.token_predictor(), trained.report)
    judged = judge(task, split, texts, None if out is None else RunDirectory(out), reference)
    return judged, {"texts": len(texts), "tokens": sum(len(text.target_ids) for text in texts)}


def require_free(out: Path, *, force: bool) -> None:
    """Refuse to write over an evaluation, or into a run."""
    place = RunDirectory(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose a directory for the evaluation")
    if place.config.exists():
        raise InputError(f"{out}: holds a run; choose another directory for its evaluation")
    if (place.result.exists() or place.predictions.exists()) and not force:
        raise InputError(f"{out}: holds an evaluation already; choose another directory, or use --force to replace it")
