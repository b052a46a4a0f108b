"""Runs on tasks whose every token is predicted: running text, and problems with solutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.methods.base import Making
from bayeslora.models import LoadedModel
from bayeslora.posterior import Factors, Posterior
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.predictions import main_metrics
from bayeslora.predict.token_predictor import TokenPredictions, TokenPredictor, read_token_predictions
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter
from bayeslora.tasks import EncodedText, ProblemTask, TokenTask
from bayeslora.tasks.boxed import require_checker
from bayeslora.train.config import RunConfig, to_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.objective import TokenObjective
from bayeslora.train.solving import Solver, solve, solving_metrics
from bayeslora.train.work import Judged, Work, chosen, splits_of

if TYPE_CHECKING:
    from peft import PeftModel

COT = "cot_"
"""Before the names of metrics over the tokens of reference solutions."""


@dataclass(frozen=True)
class TokenJudge:
    """Judges a model by the tokens of a split and, where there are problems, by the solutions it writes.

    Attributes:
        config: of the run.
        model: with its adapter.
        loaded: the base model with its tokenizer.
        predictor: predicts tokens.
        report: told how it goes.
    """

    config: RunConfig
    model: PeftModel
    loaded: LoadedModel
    predictor: TokenPredictor
    report: Reporter

    def __call__(
        self,
        task: TokenTask,
        split: str,
        texts: Sequence[EncodedText],
        directory: RunDirectory | None,
        reference: Path | None = None,
    ) -> Judged:
        """Figures on a split. Uncertain tokens are those of the ``reference``, or of the model itself if it is a LoRA."""
        predictions = self.predictor(texts, self.report.stage(f"predicting {split}"))
        if reference is not None:
            predictions = predictions.with_reference(read_reference(reference, split), str(reference))
        elif self.config.method == "lora" and self.predictor.calibration.temperature == 1.0:
            predictions = predictions.with_reference(predictions, "itself")
        if not isinstance(task, ProblemTask):
            return _judged(predictions, split, predictions.metrics(), {})
        records = self._records(task, split, directory)
        figures = solving_metrics(records) if records else {}
        figures |= {f"{COT}{name}": value for name, value in predictions.metrics().items()}
        return _judged(predictions, split, figures, {"solutions": len(records)})

    def _records(self, task: ProblemTask, split: str, directory: RunDirectory | None) -> list[dict[str, Any]]:
        settings = {
            "config": to_dict(self.config),
            "task": task.name,
            "split": split,
            "samples": self.predictor.samples,
            "draw_layers": self.predictor.layers,
            "posterior_scale": self.predictor.calibration.posterior_scale,
        }
        problems = chosen(task.load(split), self.config.prediction.solutions, "solutions")
        path = None if directory is None else directory.solutions
        return solve(self._solver, problems, path, settings, self.report.stage("solving")) if problems else []

    @property
    def _solver(self) -> Solver:
        return Solver(
            self.model,
            self.loaded.tokenizer,
            samples=self.predictor.samples,
            seed=self.config.seed,
            layers=self.predictor.layers,
            max_new_tokens=self.config.prediction.max_new_tokens,
            batch_tokens=self.config.prediction.batch_tokens,
        )


def _judged(predictions: TokenPredictions, split: str, metrics: Mapping[str, float], more: Mapping[str, Any]) -> Judged:
    def write(directory: RunDirectory) -> None:
        predictions.write(directory.tokens(split))

    return Judged(metrics, {}, write, {"tokens": len(predictions.scores), **more})


def read_reference(path: Path, split: str) -> TokenPredictions:
    """Scores of the tokens of a split from the directory of a LoRA's run, or of its evaluation."""
    directory = RunDirectory(path)
    result = directory.read_result()
    method = result["config"]["method"]
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


def make_token_predictor(model: PeftModel, loaded: LoadedModel, config: RunConfig) -> TokenPredictor:
    """What predicts as the settings say."""
    return TokenPredictor(
        model,
        loaded.tokenizer.pad_token_id,
        samples=config.prediction.samples,
        seed=config.seed,
        batch_tokens=config.prediction.batch_tokens,
        layers=config.prediction.draw_layers,
    )


def require_judgeable(config: RunConfig, task: TokenTask, samples: int) -> None:
    """Refuse early what would fail when all else is done: solutions that could not be written or checked."""
    if not isinstance(task, ProblemTask) or config.prediction.solutions == 0:
        return
    require_checker()
    if samples > 1 and find_method(config.method).foreign() is not None:
        raise InputError(
            f"method {config.method!r} is an adapter of PEFT's own, which cannot average draws while it writes solutions; use "
            "--samples 1 (or 0), or --solutions 0 to write none"
        )


def _require_learnable(config: RunConfig, task: TokenTask) -> None:
    if find_method(config.method).needs_options:
        raise InputError(
            f"method {config.method!r} is made from questions with options, and task {task.name!r} has none; choose another"
        )
    if config.training.cache_trunk:
        raise InputError(f"cache_trunk keeps what questions need, and task {task.name!r} has none; leave it out")


class TokenWork(Work):
    """See :class:`bayeslora.train.work.Work`.

    Args:
        config: the run.
        task: its text or problems.
    """

    def __init__(self, config: RunConfig, task: TokenTask) -> None:
        super().__init__(config)
        self._task = task
        self.writes_as_it_judges = isinstance(task, ProblemTask) and config.prediction.solutions != 0
        _require_learnable(config, task)
        require_judgeable(config, task, config.prediction.samples)
        for split in splits_of(config):
            task.load(split)

    def encode(self, loaded: LoadedModel) -> None:
        """See :class:`Work`."""
        self._loaded = loaded
        data, tokenizer = self.config.data, loaded.tokenizer
        lessons = self._task.encode_lessons("train", tokenizer, data.max_tokens)
        self._lessons = chosen(lessons, data.max_train, "max_train")
        whole = len(self._task.load("train")) if isinstance(self._task, ProblemTask) else len(lessons)
        self._left_out = whole - len(lessons)
        others = splits_of(self.config)[1:]
        self._texts = {split: self._task.encode(split, tokenizer, data.max_tokens) for split in others}

    def bind(self, model: PeftModel, trunk: TrunkCache | None) -> None:
        """See :class:`Work`."""
        self._model = model
        self._predictor = make_token_predictor(model, self._loaded, self.config)

    def prepare(self, report: Reporter) -> None:
        """Nothing is kept of the frozen layers."""

    @property
    def objective(self) -> TokenObjective:
        """See :class:`Work`."""
        return TokenObjective(self._model, self._predictor.pad_id, self.config.training.label_smoothing or 0.0)

    @property
    def examples(self) -> Sequence[EncodedText]:
        """See :class:`Work`."""
        return self._lessons

    def validate(self, report: Reporter) -> Mapping[str, float]:
        """See :class:`Work`."""
        return main_metrics(self._predictor(self._texts["validation"], report.stage("validating")).metrics())

    def making(self, posterior: Posterior, loras: Sequence[Factors], report: Reporter) -> Making:
        """See :class:`Work`."""
        return Making(
            posterior=posterior,
            loras=loras,
            seed=self.config.seed,
            report=report,
            fit_temperature=lambda advance: self._predictor.fit_temperature(self._texts["validation"], advance),
        )

    def judge(self, own: Calibration, chosen: Calibration | None, directory: RunDirectory, report: Reporter) -> Judged:
        """See :class:`Work`. Text is reported on the validation split too."""
        predictor = replace(self._predictor, calibration=own)
        judge = TokenJudge(self.config, self._model, self._loaded, predictor, report)
        reported = self.config.report_split
        test = judge(self._task, reported, self._texts[reported], directory)
        if isinstance(self._task, ProblemTask) or reported == "validation":
            return test
        validation = judge(self._task, "validation", self._texts["validation"], None)

        def write(directory: RunDirectory) -> None:
            test.write(directory)
            validation.write(directory)

        return replace(test, write=write, more={**test.more, "validation": {"metrics": dict(validation.metrics)}})

    def length(self, example: EncodedText) -> int:
        """See :class:`Work`."""
        return len(example.prompt_ids) + len(example.target_ids)

    @property
    def counts(self) -> dict[str, Any]:
        """See :class:`Work`."""
        parts = {"train": self._lessons, **self._texts}
        counts: dict[str, Any] = {
            split: {"texts": len(texts), "tokens": sum(len(text.target_ids) for text in texts)}
            for split, texts in parts.items()
        }
        if self._left_out:
            counts["train"]["left_out"] = {f"longer than {self.config.data.max_tokens} tokens": self._left_out}
        return counts

    def fingerprint(self) -> list[object]:
        """See :class:`Work`."""
        return [(text.prompt_ids, text.target_ids) for text in (*self._lessons, *self._texts["validation"])]
