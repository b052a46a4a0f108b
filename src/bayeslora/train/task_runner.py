"""What a run does with its task, from reading data to evaluation. Every kind of task has its own subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bayeslora.methods.base import PostHocInputs
from bayeslora.models import LoadedModel
from bayeslora.posterior import Factors, Posterior
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.split_evaluation import EvaluatedSplit
from bayeslora.tasks import SplitName
from bayeslora.train.objective import Named, Objective

if TYPE_CHECKING:
    from peft import PeftModel


class TaskRunner(ABC):
    """A run's task.

    Data are read first, so that errors in them are found before the model is loaded; then :meth:`encode`, which needs the
    tokenizer, and :meth:`bind`, which needs the adapted model; then the rest.

    Args:
        config: the run.
    """

    writes_as_it_evaluates = False
    """Whether evaluation fills a file of the directory, which only one process can do."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def kind(self) -> str:
        """Of the task: questions, labels, answers, conversations, text or problems."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Of texts to classify."""
        return None

    @abstractmethod
    def encode(self, loaded: LoadedModel) -> None:
        """Tokenise all data."""

    @abstractmethod
    def bind(self, model: PeftModel, trunk: TrunkCache | None) -> None:
        """Attach the adapted model."""

    @abstractmethod
    def prepare(self, report: Reporter) -> None:
        """Do all one-time computation, such as filling caches."""

    @property
    @abstractmethod
    def objective(self) -> Objective[Any]:
        """The training objective."""

    @property
    @abstractmethod
    def examples(self) -> Sequence[Named]:
        """The training examples."""

    @abstractmethod
    def validate(self, report: Reporter) -> Mapping[str, float]:
        """Metrics on the validation split, reported during training; ``nll`` decides when to stop."""

    @abstractmethod
    def post_hoc_inputs(self, posterior: Posterior, loras: Sequence[Factors], report: Reporter) -> PostHocInputs:
        """Inputs for fitting a method to trained LoRAs."""

    def calibrate(self, report: Reporter) -> Calibration | None:
        """Choose posterior scale and temperature on the validation split; ``None`` where that is not possible."""
        return None

    def measure_familiarity(self, chosen: Calibration | None, report: Reporter) -> Familiarity | None:
        """Fit how far questions are from those of training, beside the calibration; ``None`` where that is not possible."""
        return None

    @abstractmethod
    def evaluate(
        self, own: Calibration, chosen: Calibration | None, directory: RunDirectory, report: Reporter
    ) -> EvaluatedSplit:
        """Predict and evaluate the reported split. Long evaluations are saved to the directory as they go on.

        Args:
            own: calibration of the method itself, such as the temperature of ``temperature``.
            chosen: result of :meth:`calibrate`, for metrics after calibration.
            directory: of the run.
            report: receives progress reports.
        """

    @abstractmethod
    def length(self, example: Any) -> int:
        """Number of tokens of an example."""

    def largest_batch(self, size: int) -> Sequence[Named]:
        """A batch that takes at least as much memory as any other of this size: the longest examples."""
        return sorted(self.examples, key=self.length, reverse=True)[:size]

    @abstractmethod
    def show(self, example: Any) -> list[tuple[str, bool]]:
        """An example as the model reads it: pieces of text in order, with whether they are learnt."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Sizes of the splits, and what was left out."""

    @abstractmethod
    def fingerprint(self) -> list[object]:
        """The tokens used for training and model selection."""


def splits_of(config: RunConfig) -> tuple[SplitName, ...]:
    """The splits that a run reads: one that is reported on the validation split never sees the test split."""
    return ("train", "validation") if config.report_split == "validation" else ("train", "validation", "test")
