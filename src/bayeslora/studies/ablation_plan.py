"""Rows of an ablation, their runs, and the directories of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayeslora.runs.config import RunConfig, resolve
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablations import BASE, PRESET, Ablation, Variation, with_method
from bayeslora.studies.plan import Job

Jobs = Mapping[tuple[str, int], Job]
"""Runs by the label of a row and seed; rows may share one."""


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        label: label in the table.
        method: the varied method.
        value: the value of the varied setting.
        variation: meaning of the value.
        name: name of directories.
    """

    label: str
    method: str
    value: str
    variation: Variation
    name: str

    def config(self, study: AblationStudy, seed: int) -> RunConfig:
        """Its resolved run."""
        return resolve(self.variation.change(_plain(study, self.method, seed)))


def make_variants(ablation: Ablation, values: Sequence[str]) -> list[Variant]:
    """All rows, grouped by method. Invalid values are refused."""
    several = len(ablation.methods) > 1
    found = []
    for method in ablation.methods:
        for value in values:
            variation = ablation.variation(value)
            label = f"{value} ({variation.note})" if variation.note else value
            if several:
                label = f"{method}, {label}"
            name = f"{ablation.name}-{method}-{value}" if several else f"{ablation.name}-{value}"
            found.append(Variant(label, method, value, variation, name))
    return found


def plan_jobs(study: AblationStudy, variants: Sequence[Variant], seeds: Sequence[int], runs: Path) -> Jobs:
    """The run of every row and seed.

    In most ablations one value is the default. Those runs are stored under the name of their method, so that all ablations
    in the same directory share them.
    """
    jobs = {}
    for seed in seeds:
        defaults = {method: resolve(_plain(study, method, seed)) for method in ("lora", BASE)}
        for variant in variants:
            config = variant.config(study, seed)
            name = next((method for method, default in defaults.items() if default == config), variant.name)
            jobs[variant.label, seed] = Job(config, runs / name / f"seed-{seed}", name=name)
    return jobs


def _plain(study: AblationStudy, method: str, seed: int) -> RunConfig:
    """The run of a method before anything is varied."""
    return with_method(method)(study.run(study.task, BASE, seed, PRESET))
