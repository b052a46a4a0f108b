"""Plan of a study: its runs, their directories and dependencies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bayeslora.methods import find_method
from bayeslora.runs.config import RunConfig
from bayeslora.studies.comparison import OWN, Comparison, Trial
from bayeslora.studies.study import task_name
from bayeslora.train.origin import lora_runs

Pair = tuple[str, str]
"""A task and a method."""

Chosen = Mapping[Pair, Trial]
"""The chosen trials."""


@dataclass(frozen=True)
class Job:
    """A run with its directory. ``needs`` are directories of runs that must finish first; ``name`` describes the run if its
    method alone does not."""

    config: RunConfig
    path: Path
    needs: tuple[Path, ...] = ()
    name: str = ""

    @property
    def label(self) -> str:
        """Short description."""
        return f"{task_name(self.config.task)}, {self.name or self.config.method}, seed {self.config.seed}"


@dataclass(frozen=True)
class Evaluation:
    """A finished run, to be evaluated on the test split of a task.

    Attributes:
        run: its directory.
        task: any task.
        path: directory of the evaluation.
        label: short description.
        samples: weight draws, if not the run's own number.
        posterior_scale: factor of all standard deviations, if not the run's own.
    """

    run: Path
    task: str
    path: Path
    label: str
    samples: int | None = None
    posterior_scale: float | None = None

    @property
    def needs(self) -> tuple[Path, ...]:
        """Directories of runs that must finish first."""
        return (self.run,)


StudyJob = Job | Evaluation
"""A unit of work for one process."""


def plan(study: Comparison, out: Path, chosen: Chosen) -> list[Job]:
    """All runs of the table, dependencies first."""
    first: dict[Path, Job] = {}
    later: list[Job] = []
    for task in study.tasks:
        for method in study.method_names:
            for seed in study.seeds:
                if find_method(method).fit_post_hoc is None:
                    trial = chosen[task, method]
                    path = run_path(out, task, method, trial, seed)
                    first[path] = Job(study.config(task, method, seed, trial), path)
                    continue
                job, needed = _made(study, out, task, method, seed, chosen.get((task, "lora"), OWN))
                later.append(job)
                first |= {lora.path: lora for lora in needed if lora.path not in first}
    return [*first.values(), *later]


def run_path(out: Path, task: str, method: str, trial: Trial, seed: int) -> Path:
    """Directory of a run."""
    return path_below(out / "runs", task, method, trial, seed)


def path_below(folder: Path, task: str, method: str, trial: Trial, seed: int) -> Path:
    """Directory of a run in a folder of runs."""
    trained = f"rate-{trial.factor:g}" + ("" if trial.epochs is None else f"-epochs-{trial.epochs}")
    return folder / task_name(task) / method / trained / f"seed-{seed}"


def _made(study: Comparison, out: Path, task: str, method: str, seed: int, trial: Trial) -> tuple[Job, Sequence[Job]]:
    """The run of a method that builds on LoRAs, and the LoRAs: the runs of the table if it has their seeds."""
    config = study.config(task, method, seed, trial)
    loras = [
        Job(
            replace(lora, prediction=study.prediction) if lora.seed in study.seeds else lora,
            run_path(out, task, "lora", trial, lora.seed),
        )
        for lora in lora_runs(config)
    ]
    paths = tuple(lora.path for lora in loras)
    own = run_path(out, task, method, trial, seed)
    # relative to the run, so that a study can be moved or renamed and then resumed
    config = replace(config, start_from=tuple(os.path.relpath(path, own) for path in paths))
    return Job(config, own, paths), loras
