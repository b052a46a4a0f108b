"""Execute one run or evaluation after the other in this process, with the base model loaded once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bayeslora.errors import first_line
from bayeslora.models import LoadedModel
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.evaluation import evaluate
from bayeslora.runs.load import load_run
from bayeslora.runs.predictors import load_base
from bayeslora.runs.saved_config import from_dict
from bayeslora.studies.plan import Evaluation, Job, StudyJob
from bayeslora.train.run import RunContext, train


@dataclass(frozen=True)
class Settings:
    """Settings of a worker, which can be pickled for another process."""

    data_dir: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float = 60.0
    trust_remote_code: bool = False

    def place(self, report: Reporter | None = None) -> RunContext:
        """These settings for a run in this process."""
        return RunContext(
            data_dir=self.data_dir,
            device=self.device,
            report=report or Silent(),
            checkpoint_seconds=self.checkpoint_seconds,
            trust_remote_code=self.trust_remote_code,
        )


class Outage(str):
    """Reason of a failure that does not come from a run's own settings, such as a full disk or a base model that is not there:
    it may succeed later."""


class RunWorker:
    """Executes units of work one by one. Loads the base model at most once; the place may provide a shared one."""

    def __init__(self, settings: Settings, place: RunContext | None = None) -> None:
        self.place = place or settings.place()
        self._loaded: tuple[Any, LoadedModel] | None = None
        self._trunk: tuple[str, TrunkCache] | None = None

    def __call__(self, work: StudyJob) -> str | None:
        """Execute the work; returns the reason if it failed."""
        try:
            place = self.prepared(config_of(work))
        except Exception as error:  # without the base model no run can succeed
            return Outage(_told(error))
        try:
            if isinstance(work, Job):
                train(work.config, work.path, place)
            else:
                _evaluate(work, place)
        except Exception as error:
            kind = Outage if isinstance(error, OSError) else str
            return kind(_told(error))
        return None

    def prepared(self, config: RunConfig) -> RunContext:
        """The place with the run's base model, and the trunk cache of earlier runs."""
        if self.place.loaded is not None:
            return self.place
        if self._loaded is None or self._loaded[0] != (config.model, config.loading):
            loaded = load_base(config, self.place.device, trust_remote_code=self.place.trust_remote_code)
            self._loaded, self._trunk = ((config.model, config.loading), loaded), None
        if self._trunk is None or self._trunk[0] != config.adapter.layers:
            self._trunk = config.adapter.layers, TrunkCache()
        return replace(self.place, loaded=self._loaded[1], trunk=self._trunk[1])


def config_of(work: StudyJob) -> RunConfig:
    """Settings of the run that is trained or evaluated."""
    return work.config if isinstance(work, Job) else from_dict(RunDirectory(work.run).read_config())


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _evaluate(it: Evaluation, place: RunContext) -> None:
    trained = load_run(it.run, samples=it.samples, report=place.report, loaded=place.loaded)
    try:
        if it.posterior_scale is not None:
            trained.set_posterior_scale(it.posterior_scale)
        evaluate(trained, it.task, "test", place.data_dir, it.path)
    finally:
        trained.model.unload()
