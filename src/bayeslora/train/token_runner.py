"""Runs on tasks whose every token is predicted: running text, and problems with solutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.methods.base import PostHocInputs
from bayeslora.models import LoadedModel
from bayeslora.models.context import within_context
from bayeslora.posterior import Factors, Posterior
from bayeslora.predict.calibrate import FEWEST, Calibration, too_few
from bayeslora.predict.generation.entailment import find_same
from bayeslora.predict.questions.predictions import main_metrics
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.free_answers import calibrate_answers
from bayeslora.runs.predictors import make_token_predictor
from bayeslora.runs.split_evaluation import EvaluatedSplit, TokenEvaluator, chosen, require_evaluable
from bayeslora.tasks import AnswerTask, EncodedText, ProblemTask, TokenTask
from bayeslora.tasks.tokens import marked
from bayeslora.train.head_loss import find_sliceable_head
from bayeslora.train.objective import TokenObjective
from bayeslora.train.task_runner import TaskRunner, splits_of

if TYPE_CHECKING:
    from peft import PeftModel


def _require_learnable(config: RunConfig, task: TokenTask[Any]) -> None:
    if find_method(config.method).needs_options:
        raise InputError(
            f"method {config.method!r} is made from questions with options, and task {task.name!r} has none; choose another"
        )
    if config.training.cache_trunk:
        raise InputError(
            f"cache_trunk is for questions with choices and for labels, and task {task.name!r} has none; leave it out"
        )


class TokenRunner(TaskRunner):
    """Task runner for running text and for problems with solutions.

    Args:
        config: the run.
        task: its text or problems.
    """

    def __init__(self, config: RunConfig, task: TokenTask[Any]) -> None:
        super().__init__(config)
        self._task = task
        self.writes_as_it_evaluates = isinstance(task, (ProblemTask, AnswerTask)) and config.prediction.solutions != 0
        _require_learnable(config, task)
        require_evaluable(config, task, config.prediction.samples)
        for split in splits_of(config):
            task.load(split)

    @property
    def kind(self) -> str:
        """Of the task."""
        return self._task.kind

    def encode(self, loaded: LoadedModel) -> None:
        """Tokenise all splits."""
        self._loaded = loaded
        data, tokenizer = self.config.data, loaded.tokenizer
        limit = within_context(loaded.model, data.max_tokens)
        self._found = self._task.encode_lessons("train", tokenizer, limit)
        self._lessons = chosen(self._found.texts, data.max_train, "max_train")
        others = splits_of(self.config)[1:]
        self._texts = {split: self._task.encode(split, tokenizer, limit) for split in others}

    def bind(self, model: PeftModel, trunk: TrunkCache | None) -> None:
        """Create the predictor for the adapted model."""
        self._model = model
        self._predictor = make_token_predictor(model, self._loaded, self.config)
        self._head = find_sliceable_head(model)
        if isinstance(self._task, AnswerTask):
            find_same(self.config.prediction.nli, model.device)  # refused now, and not after training

    def prepare(self, report: Reporter) -> None:
        """Do nothing: outputs of the frozen layers are not cached."""

    @property
    def objective(self) -> TokenObjective:
        """Cross-entropy of all target tokens."""
        smoothing = self.config.training.label_smoothing or 0.0
        return TokenObjective(self._model, self._predictor.pad_id, smoothing, self._head)

    @property
    def examples(self) -> Sequence[EncodedText]:
        """The training texts."""
        return self._lessons

    def validate(self, report: Reporter) -> Mapping[str, float]:
        """Metrics on the validation texts."""
        return main_metrics(self._predictor(self._texts["validation"], report.stage("validating")).metrics())

    def post_hoc_inputs(self, posterior: Posterior, loras: Sequence[Factors], report: Reporter) -> PostHocInputs:
        """Inputs for a post-hoc fit; the temperature is fitted on the validation texts."""
        return PostHocInputs(
            posterior=posterior,
            loras=loras,
            seed=self.config.seed,
            report=report,
            fit_temperature=lambda advance: self._predictor.fit_temperature(self._texts["validation"], advance),
        )

    def calibrate(self, report: Reporter) -> Calibration | None:
        """Calibrate the confidence of free answers on the validation questions, unless the run is reported on these."""
        task, config = self._task, self.config
        wanted = config.prediction.calibrate == "validation" and config.prediction.solutions != 0
        if not isinstance(task, AnswerTask) or not wanted or config.report_split == "validation":
            return None
        evaluator = self._evaluator(Calibration(), report)
        if (count := evaluator.count_answers(task, "validation")) < FEWEST:
            report.say(too_few(count))
            return None
        records = evaluator.answers(task, "validation")
        found = calibrate_answers(records)
        return replace(
            found, samples=config.prediction.samples or None, task=config.task, split="validation", automatic=True
        )

    def _evaluator(self, own: Calibration, report: Reporter) -> TokenEvaluator:
        predictor = replace(self._predictor, calibration=own)
        return TokenEvaluator(self.config, self._model, self._loaded, predictor, report)

    def evaluate(
        self, own: Calibration, chosen: Calibration | None, directory: RunDirectory, report: Reporter
    ) -> EvaluatedSplit:
        """Predict and evaluate the reported split; running text is also reported on the validation split."""
        evaluate = replace(self._evaluator(own, report), calibration=chosen)
        reported = self.config.report_split
        test = evaluate(self._task, reported, self._texts[reported], directory)
        if isinstance(self._task, (ProblemTask, AnswerTask)) or reported == "validation":
            return test
        validation = evaluate(self._task, "validation", self._texts["validation"], None)

        def write(directory: RunDirectory) -> None:
            test.write(directory)
            validation.write(directory)

        return replace(test, write=write, more={**test.more, "validation": {"metrics": dict(validation.metrics)}})

    def length(self, example: EncodedText) -> int:
        """Number of tokens of a text."""
        return len(example)

    def largest_batch(self, size: int) -> Sequence[EncodedText]:
        """The longest text repeated, to which a batch of the longest would be padded."""
        return [max(self._lessons, key=self.length)] * min(size, len(self._lessons))

    def show(self, example: EncodedText) -> list[tuple[str, bool]]:
        """The tokens of a text as text."""
        return list(marked(example, self._loaded.tokenizer))

    @property
    def counts(self) -> dict[str, Any]:
        """Sizes of the splits, and how many training texts were left out."""
        parts = {"train": self._lessons, **self._texts}
        counts: dict[str, Any] = {
            split: {"texts": len(texts), "tokens": sum(text.terms for text in texts)} for split, texts in parts.items()
        }
        if left_out := {**self._task.rows_left_out("train"), **self._found.left_out}:
            counts["train"]["left_out"] = left_out
        if self._found.truncated:
            counts["train"]["truncated"] = self._found.truncated
        return counts

    def fingerprint(self) -> list[object]:
        """The tokens of the training and validation texts."""
        texts = (*self._lessons, *self._texts["validation"])
        return [
            (text.prompt_ids, text.target_ids, *(() if text.counted is None else (text.counted,))) for text in texts
        ]
