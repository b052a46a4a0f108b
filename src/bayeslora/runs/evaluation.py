"""Evaluate a trained run on a split of a task."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.models.context import within_context
from bayeslora.predict.questions.familiarity import tell_apart
from bayeslora.predict.questions.predictions import read_scores
from bayeslora.runs.calibration import calibration_of_method
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.environment import describe_environment, peak_memory
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import to_dict
from bayeslora.runs.split_evaluation import (
    EvaluatedSplit,
    evaluate_questions,
    read_reference,
    require_evaluable,
)
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import OwnFormat, Task, TokenTask


def evaluate(
    trained: TrainedModel,
    task: str | None,
    split: str,
    data_dir: Path | None = None,
    out: Path | None = None,
    reference: Path | None = None,
    how: OwnFormat | None = None,
) -> RunResult:
    """Metrics on a split, in the format of ``result.json``; with ``out`` they are written there with the predictions.

    A calibrated run is evaluated as trained, and after calibration under ``calibrated``. On questions of another task than the
    run's own, ``shift`` says how well each score tells them from the run's own test questions.

    For tasks that predict every token, ``reference`` is the directory of a LoRA's run whose entropies determine the uncertain
    tokens. ``how`` is the format of own data, by default that of the training data.
    """
    start, state = time.perf_counter(), trained.directory.fingerprint()
    name = task or trained.config.task
    evaluated, counts = _evaluate(trained, trained.find_task(name, data_dir, how), split, out, reference)
    if name != trained.config.task:
        evaluated = _with_shift(trained, evaluated)
    seconds = time.perf_counter() - start
    device = trained.model.device
    result = RunResult(
        config=to_dict(trained.config),
        environment=describe_environment(device),
        seed=trained.config.seed,
        task=name,
        run_state=state,
        split=split,
        samples=trained.samples,
        draw_layers=trained.draw_layers,
        calibration={
            "temperature": trained.calibration.temperature,
            "posterior_scale": trained.calibration.posterior_scale,
        },
        metrics=evaluated.metrics,
        intervals=evaluated.intervals,
        counts={split: counts},
        timing={"predict_seconds": seconds},
        memory={"peak_bytes": peak_memory(device)},
        reference=None if reference is None else str(reference),
        **evaluated.more,
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        evaluated.write(RunDirectory(out))
        result.write(RunDirectory(out).result)
    return result


def _evaluate(
    trained: TrainedModel, task: Task | TokenTask[Any], split: str, out: Path | None, reference: Path | None
) -> tuple[EvaluatedSplit, dict[str, int]]:
    """Metrics, and the number of questions or tokens they are computed on."""
    if isinstance(task, Task):
        if reference is not None:
            raise InputError(f"reference belongs to tasks of text, and task {task.name!r} has questions; leave it out")
        raw, calibrated = trained.predict_task_both(task, split)
        _clear(out)
        return evaluate_questions(raw, calibrated, trained.calibration), {"questions": len(raw.items)}
    require_evaluable(trained.config, task, trained.samples)
    if reference is not None:
        read_reference(reference, split)  # fail early
    limit = within_context(trained.loaded.model, trained.config.data.max_tokens)
    texts = task.encode(split, trained.loaded.tokenizer, limit)
    _clear(out)
    evaluator = replace(trained.token_evaluator(), state=trained.directory.fingerprint())
    evaluated = evaluator(task, split, texts, None if out is None else RunDirectory(out), reference)
    return evaluated, {"texts": len(texts), "tokens": sum(text.terms for text in texts)}


def _clear(out: Path | None) -> None:
    """Remove an earlier evaluation, which may have been of another kind of task."""
    if out is not None:
        RunDirectory(out).clear_evaluation()


def _with_shift(trained: TrainedModel, evaluated: EvaluatedSplit) -> EvaluatedSplit:
    """Add the AUROC, by each score, of telling the questions from the run's own, whose predictions are in its directory.

    Both must be predicted alike; otherwise nothing is added.
    """
    own, told = trained.directory.predictions, trained.config.prediction
    same = (trained.samples, trained.draw_layers) == (told.samples, told.draw_layers)
    alike = same and trained.own == calibration_of_method(trained.directory)
    if not (evaluated.scores and own.exists() and alike):
        return evaluated
    found = tell_apart(read_scores(own), evaluated.scores)
    return replace(evaluated, more={**evaluated.more, "shift": found})


def require_free(out: Path, *, force: bool) -> None:
    """Refuse to overwrite an evaluation, or to write into a run."""
    place = RunDirectory(out)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; choose a directory for the evaluation")
    if any(above.is_file() for above in out.parents):
        raise InputError(f"{out}: is below a file; choose another directory for the evaluation")
    if place.config.exists():
        raise InputError(f"{out}: holds a run; choose another directory for its evaluation")
    if (found := place.evaluation_files()) and not force:
        raise InputError(
            f"{out}: holds an evaluation already ({found[0].name}); choose another directory, or use --force to replace it"
        )
