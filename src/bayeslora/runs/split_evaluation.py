"""Evaluate predictions of questions with options, of every token, and of generated solutions."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bayeslora.adapter.base import find_any_holder
from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.metrics import ReliabilityBins, reliability_bins_from_confidence
from bayeslora.models import LoadedModel
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.generation import Writing
from bayeslora.predict.generation.confidence import AnswerWriter
from bayeslora.predict.generation.entailment import find_same
from bayeslora.predict.questions.familiarity import uncertainty_scores
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.tokens.predictor import TokenPredictions, TokenPredictor, read_token_predictions
from bayeslora.progress import Reporter
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.free_answers import MOST_TOKENS, answer_metrics, answer_reliability, make_answering, with_confidence
from bayeslora.runs.saved_config import to_dict
from bayeslora.runs.solving import make_solver, solving_metrics
from bayeslora.tasks import AnswerTask, EncodedText, FreeQuestion, ProblemTask, TokenTask
from bayeslora.tasks.boxed import require_checker
from bayeslora.tasks.rows import digest

if TYPE_CHECKING:
    from peft import PeftModel

T = TypeVar("T")


@dataclass(frozen=True)
class EvaluatedSplit:
    """Metrics of predictions, and how to save the predictions.

    Attributes:
        metrics: by name, as fractions and nats.
        intervals: confidence intervals of some metrics.
        write: writes the predictions into a directory.
        more: additional entries of the result.
        reliability: bins of the confidences as trained and, if there is a calibration, after it.
        scores: of questions as trained, by which those of another task may be told from the run's own.
    """

    metrics: Mapping[str, float]
    intervals: Mapping[str, Mapping[str, float]]
    write: Callable[[RunDirectory], None]
    more: Mapping[str, Any] = field(default_factory=dict)
    reliability: Mapping[str, ReliabilityBins] = field(default_factory=dict)
    scores: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


BEFORE, AFTER = "as trained", "calibrated"
"""Names of both sides of a calibration."""


def evaluate_questions(raw: Predictions, after: Predictions | None, calibration: Calibration | None) -> EvaluatedSplit:
    """Evaluate predictions of questions with answers, as trained and after calibration."""

    def write(directory: RunDirectory) -> None:
        raw.write(directory.predictions)
        if after is not None:
            after.write(directory.calibrated)

    more: dict[str, Any] = {"predictions": FILES.predictions.name}
    reliability = {BEFORE: raw.reliability()}
    if after is not None and calibration is not None:
        more["calibrated"] = {
            "temperature": calibration.temperature,
            "posterior_scale": calibration.posterior_scale,
            "draw_layers": calibration.draw_layers,
            "metrics": after.metrics(),
            "intervals": after.intervals(),
            "predictions": FILES.calibrated.name,
        }
        reliability[AFTER] = after.reliability()
    return EvaluatedSplit(raw.metrics(), raw.intervals(), write, more, reliability, uncertainty_scores(raw))


FILES = RunDirectory(Path())


COT = "cot_"
"""Prefix of metrics over the tokens of reference solutions."""


@dataclass(frozen=True)
class TokenEvaluator:
    """Evaluates a model on the tokens of a split and, for problems, on the solutions it generates.

    Attributes:
        config: of the run.
        model: with its adapter.
        loaded: the base model with its tokenizer.
        predictor: predicts tokens.
        report: receives progress reports.
        calibration: for metrics of free answers after calibration.
        state: fingerprint of a finished run; texts that another one has begun to write are not continued.
    """

    config: RunConfig
    model: PeftModel
    loaded: LoadedModel
    predictor: TokenPredictor
    report: Reporter
    calibration: Calibration | None = None
    state: str = ""

    def __call__(
        self,
        task: TokenTask[Any],
        split: str,
        texts: Sequence[EncodedText],
        directory: RunDirectory | None,
        reference: Path | None = None,
    ) -> EvaluatedSplit:
        """Evaluate a split. Uncertain tokens are those of the ``reference``, or of the model itself if it is a LoRA."""
        predictions = self.predictor(texts, self.report.stage(f"predicting {split}"))
        if reference is not None:
            predictions = predictions.with_reference(read_reference(reference, split), str(reference))
        elif self.config.method == "lora" and self.predictor.calibration.temperature == 1.0:
            predictions = predictions.with_reference(predictions, "itself")
        if isinstance(task, ProblemTask):
            return self._solved(task, split, predictions, directory)
        if isinstance(task, AnswerTask):
            return self._answered(task, split, predictions, directory)
        bins = reliability_bins_from_confidence(predictions.scores.confidence, predictions.scores.correct)
        return _evaluated(predictions, split, predictions.metrics(), {}, {BEFORE: bins})

    def _solved(
        self, task: ProblemTask, split: str, predictions: TokenPredictions, directory: RunDirectory | None
    ) -> EvaluatedSplit:
        """Evaluate solutions that are generated, and the tokens of the reference solutions."""
        config = self.config.prediction
        solver = make_solver(
            self.model,
            self.loaded.tokenizer,
            self.predictor.sampling,
            max_new_tokens=config.max_new_tokens,
            batch_tokens=config.batch_tokens,
        )
        problems = chosen(tuple(task.load(split)), config.solutions, "solutions")
        path = None if directory is None else directory.solutions
        records = solver.records(problems, path, self._settings(task, split, problems), self.report.stage("solving"))
        figures = solving_metrics(records) if records else {}
        figures |= {f"{COT}{name}": value for name, value in predictions.metrics().items()}
        return _evaluated(predictions, split, figures, {"solutions": len(records)})

    def _answered(
        self, task: AnswerTask, split: str, predictions: TokenPredictions, directory: RunDirectory | None
    ) -> EvaluatedSplit:
        """Evaluate free answers that are generated with their confidence, and the tokens of the reference answers."""
        records = self.answers(task, split, None if directory is None else directory.answers)
        own = {"nll": predictions.metrics()["nll"]}
        figures = own | (answer_metrics(records) if records else {})
        more: dict[str, Any] = {"solutions": len(records)}
        reliability = {BEFORE: answer_reliability(records)} if records else {}
        if self.calibration is not None and self.calibration.confidence is not None and records:
            calibrated = with_confidence(records, self.calibration)
            after = answer_metrics(calibrated)
            more["calibrated"] = {"threshold": self.calibration.threshold, "metrics": own | after, "intervals": {}}
            reliability[AFTER] = answer_reliability(calibrated)
        return _evaluated(predictions, split, figures, more, reliability)

    def answers(self, task: AnswerTask, split: str, path: Path | None = None) -> list[dict[str, Any]]:
        """Answers to the questions of a split, with the confidence that they have before calibration."""
        tokens = min(MOST_TOKENS, self.config.prediction.max_new_tokens)
        sampling = self.predictor.sampling
        writer = AnswerWriter(
            self.model,
            self.loaded.tokenizer,
            sampling,
            Writing(max_new_tokens=tokens),
            same=find_same(self.config.prediction.nli, self.model.device),
        )
        draws = max(1, sampling.count(find_any_holder(self.model)))
        answering = make_answering(writer, self.config.prediction.batch_tokens, draws)
        questions = self._asked(task, split)
        return answering.records(
            questions, path, self._settings(task, split, questions), self.report.stage("answering")
        )

    def count_answers(self, task: AnswerTask, split: str) -> int:
        """Number of questions that :meth:`answers` asks."""
        return len(self._asked(task, split))

    def _asked(self, task: AnswerTask, split: str) -> Sequence[FreeQuestion]:
        return chosen(tuple(task.load(split)), self.config.prediction.solutions, "solutions")

    def _settings(self, task: TokenTask[Any], split: str, asked: Sequence[object]) -> dict[str, Any]:
        """All that generated texts depend on."""
        return {
            "config": to_dict(self.config),
            "run_state": self.state,
            "task": task.name,
            "split": split,
            "data": digest(repr(list(asked))),
            "samples": self.predictor.sampling.samples,
            "draw_layers": self.predictor.sampling.layers,
            "posterior_scale": self.predictor.calibration.posterior_scale,
        }


def _evaluated(
    predictions: TokenPredictions,
    split: str,
    metrics: Mapping[str, float],
    more: Mapping[str, Any],
    reliability: Mapping[str, ReliabilityBins] | None = None,
) -> EvaluatedSplit:
    def write(directory: RunDirectory) -> None:
        predictions.write(directory.tokens(split))

    return EvaluatedSplit(metrics, {}, write, {"tokens": len(predictions.scores), **more}, reliability or {})


def read_reference(path: Path, split: str) -> TokenPredictions:
    """Read scores of the tokens of a split from the directory of a LoRA's run, or of its evaluation."""
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; give that of a LoRA's run, or of its evaluation, as reference")
    directory = RunDirectory(path)
    result = directory.read_result()
    method = result.config["method"]
    if method != "lora":
        raise InputError(
            f"{path}: is of method {method!r}; give a run of method 'lora' (or its evaluation) as reference"
        )
    if not directory.tokens(split).exists():
        raise InputError(
            f"{path}: has no scores of the tokens of split {split!r}; give a LoRA run on this task, or a directory that "
            "bayeslora evaluate --out has written for it"
        )
    return read_token_predictions(directory.tokens(split))


def require_evaluable(config: RunConfig, task: TokenTask[Any], samples: int) -> None:
    """Refuse early what would fail at the end: solutions or answers that could not be generated or checked."""
    if not isinstance(task, (ProblemTask, AnswerTask)) or config.prediction.solutions == 0:
        return
    if isinstance(task, ProblemTask):
        require_checker()
    if samples > 1 and find_method(config.method).foreign() is not None:
        raise InputError(
            f"method {config.method!r} is an adapter of PEFT's own, which cannot average draws while it writes solutions; use "
            "--samples 1 (or 0), or --solutions 0 to write none"
        )


def chosen(items: Sequence[T], limit: int | None, word: str) -> Sequence[T]:
    """Choose ``limit`` items at random, or all. The choice is the same for all seeds, so ensemble members share their data."""
    if limit is None:
        return items
    order = list(range(len(items)))
    random.Random(word).shuffle(order)
    return [items[place] for place in order[:limit]]
