"""Settings of an ablation. Imports are light, because the command line is built from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from bayeslora.errors import InputError
from bayeslora.runs.config import PredictionConfig
from bayeslora.studies.study import Study, require_distinct, require_distinct_tasks, task_name


@dataclass(frozen=True, kw_only=True)
class AblationStudy(Study):
    """One setting of Bayesian-LoRA varied on one task, everything else being equal."""

    prediction: PredictionConfig = field(default_factory=lambda: PredictionConfig(calibrate="none"))
    task: str
    """Training task, by name or by the path of your own questions."""
    values: tuple[str, ...] = ()
    """Values to try; the ablation's own by default."""
    seeds: tuple[int, ...] = ()
    """Seeds of the runs of every value; 0 1 2 by default, and ten for the ablation seeds."""

    def __post_init__(self) -> None:
        require_distinct("values", self.values)
        require_distinct("seeds", self.seeds)
        require_distinct_tasks(self.shift)
        if task_name(self.task) in map(task_name, self.shift):
            raise InputError(f"shift names {task_name(self.task)!r}, the task that is learnt; name others")
