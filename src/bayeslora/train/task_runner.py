"""What a run does with its task, from reading it to judging what was learnt. Every kind of task has its own form of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bayeslora.methods.base import PostHocInputs
from bayeslora.models import LoadedModel
from bayeslora.posterior import Factors, Posterior
from bayeslora.predict.calibrate import Calibration
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
    """A run's task. Reading comes first, so that whatever is wrong with data is found before the model is loaded; then
    :meth:`encode`, which needs the tokenizer, and :meth:`bind`, which needs the adapted model; then the rest.

    Args:
        config: the run.
    """

    writes_as_it_evaluates = False
    """Whether judging fills a file of the directory, which only one process can do."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @abstractmethod
    def encode(self, loaded: LoadedModel) -> None:
        """Make tokens of everything."""

    @abstractmethod
    def bind(self, model: PeftModel, trunk: TrunkCache | None) -> None:
        """Take the model that learns."""

    @abstractmethod
    def prepare(self, report: Reporter) -> None:
        """Do once what can be done before all else."""

    @property
    @abstractmethod
    def objective(self) -> Objective[Any]:
        """What is learnt."""

    @property
    @abstractmethod
    def examples(self) -> Sequence[Named]:
        """What it is learnt from."""

    @abstractmethod
    def validate(self, report: Reporter) -> Mapping[str, float]:
        """Figures on the validation split, told while a run goes on; ``nll`` decides when to stop."""

    @abstractmethod
    def post_hoc_inputs(self, posterior: Posterior, loras: Sequence[Factors], report: Reporter) -> PostHocInputs:
        """What there is to make a method from LoRAs."""

    def calibrate(self, report: Reporter) -> Calibration | None:
        """Choose posterior scale and temperature on the validation split; nothing where that cannot be done."""
        return None

    @abstractmethod
    def evaluate(
        self, own: Calibration, chosen: Calibration | None, directory: RunDirectory, report: Reporter
    ) -> EvaluatedSplit:
        """Predict what the run is reported by. TaskRunner that takes long is kept in the directory as it goes on.

        Args:
            own: what belongs to the method itself, such as the temperature of ``temperature``.
            chosen: what :meth:`calibrate` found, for figures after calibration.
            directory: of the run.
            report: told how it goes.
        """

    @abstractmethod
    def length(self, example: Any) -> int:
        """Tokens that an example takes."""

    @property
    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """How much there is of every split, and what was left out."""

    @abstractmethod
    def fingerprint(self) -> list[object]:
        """The very tokens that are learnt from and chosen by."""


def splits_of(config: RunConfig) -> tuple[SplitName, ...]:
    """What a run reads: one that is about the validation split never sees the test split."""
    return ("train", "validation") if config.report_split == "validation" else ("train", "validation", "test")
