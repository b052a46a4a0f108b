"""Common settings of all studies. Imports are light, because the command line is built from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from bayeslora.errors import InputError
from bayeslora.runs.card import DATA_SUFFIXES
from bayeslora.runs.config import AdapterConfig, DataConfig, ModelConfig, PredictionConfig, RunConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings shared by all runs."""

    model: str
    """smollm2, a directory, or a hub id such as org/model."""
    shift: tuple[str, ...] = ()
    """Tasks on whose test split every run is also evaluated, without training on them."""
    data: DataConfig = field(default_factory=DataConfig)
    loading: Annotated[ModelConfig, arg(name="base model")] = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    prediction: PredictionConfig = field(default_factory=PredictionConfig)

    def run(self, task: str, method: str, seed: int, preset: str = "default") -> RunConfig:
        """One of the runs, before the method's preset is filled in."""
        return RunConfig(
            model=self.model,
            task=task,
            method=method,
            preset=preset,
            seed=seed,
            data=self.data,
            loading=self.loading,
            adapter=self.adapter,
            training=self.training,
            prediction=self.prediction,
        )


def task_name(task: str) -> str:
    """A task's name, also if it was given as a path; only the ending of a file of data is left out."""
    from bayeslora.tasks import TASKS

    if task in TASKS:
        return task
    path = Path(task)
    return path.stem if path.suffix in DATA_SUFFIXES else path.name


def require_distinct(name: str, values: Sequence[object]) -> None:
    """Refuse an option with duplicate values."""
    if len(set(values)) < len(values):
        raise InputError(f"{name} names one twice ({', '.join(map(str, values))}); give each once")


def require_distinct_tasks(tasks: Sequence[str]) -> None:
    """Refuse tasks whose results would share a directory."""
    seen: dict[str, str] = {}
    for task in tasks:
        name = task_name(task)
        if name in seen:
            raise InputError(
                f"two tasks have the same name {name!r}: {seen[name]} and {task} (the ending of a file does not count); "
                "give each once, or rename one"
            )
        seen[name] = task
