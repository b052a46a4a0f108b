"""Runs on questions with options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayeslora.errors import InputError
from bayeslora.methods.base import QuestionPostHocInputs
from bayeslora.models import LoadedModel
from bayeslora.models.context import context_length, within_context
from bayeslora.posterior import Factors, Posterior
from bayeslora.predict.calibrate import FEWEST, Calibration, fit_temperature, too_few
from bayeslora.predict.calibrate.fit import FEW_SCALES, calibrate, predict_both
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.options import packed_length
from bayeslora.predict.questions.predictions import Predictions, main_metrics
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Advance, Reporter
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.familiarity import fit_familiarity
from bayeslora.runs.predictors import make_predictor, make_scorer
from bayeslora.runs.split_evaluation import EvaluatedSplit, chosen, evaluate_questions
from bayeslora.tasks import Questions, Split, Task, encode_items, require_gold
from bayeslora.train.objective import Example, QuestionObjective
from bayeslora.train.task_runner import TaskRunner, splits_of

if TYPE_CHECKING:
    from peft import PeftModel


class QuestionRunner(TaskRunner):
    """Task runner for questions with options.

    Args:
        config: the run.
        task: its questions.
    """

    def __init__(self, config: RunConfig, task: Task) -> None:
        super().__init__(config)
        self.task = task
        self._splits = _read(config, task)
        self._parts: dict[str, Questions] = {}
        self._validated: Predictions | None = None

    @property
    def kind(self) -> str:
        """Of the task."""
        return self.task.kind

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The common options of texts to classify."""
        return None if self.kind != "labels" else tuple(it.strip() for it in self._splits["train"].items[0].options)

    def encode(self, loaded: LoadedModel) -> None:
        """Tokenise the questions of all splits; those of evaluation as a predictor does."""
        self._loaded = loaded
        data, context = self.config.data, context_length(loaded.model) or 0
        limit = within_context(loaded.model, data.max_tokens)
        for name, split in self._splits.items():
            whole = 0 if name == "train" else context
            encoded = encode_items(split.items, loaded.tokenizer, data.scoring, limit, whole)
            self._parts[name] = Questions(split.items, encoded)

    def bind(self, model: PeftModel, trunk: TrunkCache | None) -> None:
        """Create scorer and predictor for the adapted model."""
        self._scorer = make_scorer(model, self._loaded, self.config, trunk)
        self._predictor = make_predictor(self._scorer, self._loaded, self.config)

    def prepare(self, report: Reporter) -> None:
        """Cache the outputs of the frozen layers for all questions."""
        encoded = [item for part in self._parts.values() for item in part.encoded]
        advance = report.stage("computing the frozen layers")
        self._scorer.prepare(encoded, self.config.prediction.batch_tokens, advance)

    @property
    def objective(self) -> QuestionObjective:
        """Cross-entropy of the right options."""
        return QuestionObjective(self._scorer, self.config.training.label_smoothing or 0.0)

    @property
    def examples(self) -> Sequence[Example]:
        """The training questions."""
        train = self._parts["train"]
        rows = zip(train.items, train.encoded, require_gold(train.items), strict=True)
        return [Example(item.id, encoded, gold) for item, encoded, gold in rows]

    def validate(self, report: Reporter) -> Mapping[str, float]:
        """Metrics on the validation questions."""
        validation = self._parts["validation"]
        predictions = self._predictor(validation.items, validation.encoded, report.stage("validating"))
        return main_metrics(predictions.metrics())

    def post_hoc_inputs(
        self, posterior: Posterior, loras: Sequence[Factors], report: Reporter
    ) -> QuestionPostHocInputs:
        """Inputs for a post-hoc fit, with training and validation questions."""
        validation = self._parts["validation"]

        def temperature(advance: Advance) -> float:
            scores = self._predictor.score(validation.encoded, advance)
            return fit_temperature(scores.predictive, np.array(require_gold(validation.items)))

        return QuestionPostHocInputs(
            posterior=posterior,
            loras=loras,
            seed=self.config.seed,
            report=report,
            fit_temperature=temperature,
            predictor=self._predictor,
            train=self._parts["train"],
            validation=validation,
        )

    def calibrate(self, report: Reporter) -> Calibration | None:
        """Calibrate on the validation questions, unless the run is reported on these."""
        if not self._calibrates:
            if self._wants_calibration:
                report.say(too_few(len(self._parts["validation"].items)))
            return None
        part, advance = self._parts["validation"], report.stage("calibrating")
        found, self._validated = calibrate(
            self._predictor, part.items, part.encoded, scales=FEW_SCALES, advance=advance
        )
        return replace(found, task=self.config.task, split="validation", automatic=True)

    @property
    def _wants_calibration(self) -> bool:
        return self.config.prediction.calibrate == "validation" and self.config.report_split != "validation"

    @property
    def _calibrates(self) -> bool:
        """Whether there are validation questions for anything but choosing when to stop."""
        return self._wants_calibration and len(self._parts["validation"].items) >= FEWEST

    def measure_familiarity(self, chosen: Calibration | None, report: Reporter) -> Familiarity | None:
        """Fit to features of training questions, if the run is calibrated."""
        train, part = self._parts["train"], self._parts["validation"]
        if chosen is None or not self._calibrates or len(train.encoded) < 2:
            return None
        validated = self._validated or replace(self._predictor, calibration=chosen)(part.items, part.encoded)
        found = fit_familiarity(self._predictor, train.encoded, validated, part.encoded, self.config.prediction, report)
        self._predictor = replace(self._predictor, familiarity=found)
        return found

    def evaluate(
        self, own: Calibration, chosen: Calibration | None, directory: RunDirectory, report: Reporter
    ) -> EvaluatedSplit:
        """Predict and evaluate the reported split."""
        reported, predictor = self._parts[self.config.report_split], replace(self._predictor, calibration=own)
        advance = report.stage("predicting")
        return evaluate_questions(*predict_both(predictor, reported.items, reported.encoded, chosen, advance), chosen)

    def length(self, example: Example) -> int:
        """Number of tokens of a question."""
        return packed_length(example.encoded)

    def show(self, example: Example) -> list[tuple[str, bool]]:
        """The prompt of a question and its right option."""
        decode, encoded = self._loaded.tokenizer.decode, example.encoded
        return [(str(decode(encoded.prompt_ids)), False), (str(decode(encoded.option_ids[example.gold])), True)]

    @property
    def counts(self) -> dict[str, Any]:
        """Number of questions of every split, and what was left out."""
        return {name: {"questions": len(split), "left_out": dict(split.counts)} for name, split in self._splits.items()}

    def fingerprint(self) -> list[object]:
        """The tokens of the training and validation questions."""
        return [
            (encoded.prompt_ids, encoded.option_ids, item.gold)
            for name in ("train", "validation")
            for item, encoded in zip(self._parts[name].items, self._parts[name].encoded, strict=True)
        ]


def _read(config: RunConfig, task: Task) -> dict[str, Split]:
    """Read the splits of a run, with answers and at most the configured number of training questions."""
    splits: dict[str, Split] = {name: task.load(name) for name in splits_of(config)}
    limit = config.data.max_train
    if limit is not None:
        splits["train"] = replace(splits["train"], items=tuple(chosen(splits["train"].items, limit, "max_train")))
    for name, split in splits.items():
        if not split.items:
            raise InputError(f"task {config.task!r}: its {name} split is empty; a run needs {', '.join(splits)}")
        try:
            require_gold(split)
        except InputError as error:
            raise InputError(f"task {config.task!r}, {name} split: {error}") from error
    return splits
