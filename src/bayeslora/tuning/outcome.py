"""Outcome of a search: feasible trials, the front and the chosen trial, as files, a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bayeslora.atomic_files import replacing, write_json
from bayeslora.figures.pareto import FrontPoint, pareto_figure
from bayeslora.runs.config import RunConfig
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.study import task_name
from bayeslora.tuning.config import OBJECTIVES, Tuning
from bayeslora.tuning.front import Floats, hypervolume, non_dominated, reference_point
from bayeslora.tuning.log import Trial
from bayeslora.tuning.space import Space
from bayeslora.wording import counted

SCHEMA = 1
SHOWN = (*OBJECTIVES, "train_seconds")


@dataclass(frozen=True, eq=False)
class Outcome:
    """The trials of a search, its Pareto front and the chosen trial.

    Attributes:
        tuning: settings of the search.
        trials: all of them.
        baseline: LoRA's outcomes, if constraints are relative to them.
    """

    tuning: Tuning
    trials: Sequence[Trial]
    baseline: Mapping[str, float]

    @cached_property
    def objectives(self) -> Floats:
        """``[N, 3]``, to be minimised; NaN where a trial has no outcome."""
        rows = [
            [factor * trial.outcomes.get(name, np.nan) for name, factor in OBJECTIVES.items()] for trial in self.trials
        ]
        return np.array(rows, dtype=float).reshape(len(rows), len(OBJECTIVES))

    @cached_property
    def violations(self) -> Floats:
        """``[N, J]``, at most zero where a constraint is satisfied; NaN where a trial has no outcome."""
        limits = self.tuning.limits
        rows = [
            [limit.violation(trial.outcomes, self.baseline) if trial.outcomes else np.nan for limit in limits]
            for trial in self.trials
        ]
        return np.array(rows, dtype=float).reshape(len(rows), len(limits))

    @property
    def all_failed(self) -> bool:
        """Whether no trial has an outcome."""
        return not any(trial.outcomes for trial in self.trials)

    @cached_property
    def feasible(self) -> NDArray[np.bool_]:
        """``[N]``, which trials have an outcome and satisfy all constraints."""
        return np.asarray(np.isfinite(self.objectives).all(1) & (self.violations <= 0).all(1))

    @cached_property
    def front(self) -> list[int]:
        """Numbers of the feasible trials that no other feasible one dominates."""
        kept = np.flatnonzero(self.feasible)
        return [int(number) for number in kept[non_dominated(self.objectives[kept])]]

    @cached_property
    def chosen(self) -> int | None:
        """The trial of the front with the least NLL; of equal ones the earliest."""
        nll = list(OBJECTIVES).index("nll")
        return min(self.front, key=lambda number: (self.objectives[number, nll], number), default=None)

    @cached_property
    def bounds(self) -> dict[str, float]:
        """The bounds as numbers, by the constraint's text."""
        return {
            text: limit.bound(self.baseline)
            for text, limit in zip(self.tuning.constraints, self.tuning.limits, strict=True)
        }

    @cached_property
    def reference(self) -> Floats | None:
        """Reference point of the hypervolumes, in terms of the objectives."""
        return reference_point(self.objectives[self.feasible]) if self.front else None

    @cached_property
    def hypervolumes(self) -> list[float]:
        """Hypervolume of the front after each trial, all with the final reference point."""
        if self.reference is None:
            return []
        so_far = [np.flatnonzero(self.feasible[: k + 1]) for k in range(len(self.trials))]
        return [hypervolume(self.objectives[kept], self.reference) for kept in so_far]


def chosen_run(outcome: Outcome, space: Space) -> RunConfig | None:
    """The chosen run, to be evaluated on the test split; ``None`` if no trial is feasible."""
    if outcome.chosen is None:
        return None
    return replace(space.config(outcome.trials[outcome.chosen].values), report_split="test")


def write_outcome(outcome: Outcome, space: Space, out: Path, device: torch.device) -> None:
    """Write record, table, settings of the chosen run, and figure."""
    write_json(out / "tuned.json", _record(outcome, device))
    with replacing(out / "trials.md") as partial:
        partial.write_text(describe(outcome), encoding="utf-8")
    config = chosen_run(outcome, space)
    if config is not None:
        write_json(out / "chosen.json", to_dict(config))
    if any(trial.outcomes for trial in outcome.trials):
        _draw(outcome, out / "pareto.png")


def describe(outcome: Outcome) -> str:
    """All trials as a Markdown table, and the conclusion."""
    parts = [_table(outcome), verdict(outcome)]
    failures = [f"- trial {trial.number}: {trial.failure}" for trial in outcome.trials if trial.failure]
    if failures:
        parts.append("Failed:\n\n" + "\n".join(failures))
    return "\n\n".join(parts) + "\n"


def _table(outcome: Outcome) -> str:
    names = [axis.name for axis in outcome.tuning.axes]
    head = ["trial", *names, *SHOWN, "feasible", "front"]
    lines = [f"| {' | '.join(head)} |", "|---:" * (len(head) - 2) + "|---|---|"]
    for trial in outcome.trials:
        settings = [f"{trial.values[name]:.4g}" for name in names]
        outcomes = [f"{trial.outcomes[name]:.4f}" if trial.outcomes else "—" for name in SHOWN]
        state = "failed" if trial.state == "failed" else "yes" if outcome.feasible[trial.number] else "no"
        place = "chosen" if trial.number == outcome.chosen else "yes" if trial.number in outcome.front else ""
        lines.append(f"| {' | '.join([str(trial.number), *settings, *outcomes, state, place])} |")
    return "\n".join(lines)


def verdict(outcome: Outcome) -> str:
    """Conclusion from the trials, in a sentence."""
    if outcome.all_failed:
        return "All trials failed; correct what the reasons name, and give the same command again."
    bounds = ", ".join(f"{text} ({bound:.4g})" if "lora" in text else text for text, bound in outcome.bounds.items())
    if outcome.chosen is None:
        return f"No trial keeps {bounds}; loosen the constraints, widen the search, or give more trials."
    trial = outcome.trials[outcome.chosen]
    settings = ", ".join(f"{name} {value:.4g}" for name, value in trial.values.items())
    kept = f" that keep {bounds}" if bounds else ""
    return (
        f"{counted(len(outcome.front), 'trial')} on the front, of {int(outcome.feasible.sum())}{kept} and {len(outcome.trials)} "
        f"in all. Chosen: trial {outcome.chosen} ({settings}), which has the lowest NLL on the front."
    )


def _record(outcome: Outcome, device: torch.device) -> dict[str, Any]:
    """Everything but the trials, which are in the log."""
    reference = None if outcome.reference is None else outcome.reference.tolist()
    return {
        "schema": SCHEMA,
        "study": to_dict(outcome.tuning),
        "environment": describe_environment(device) | {"botorch": version("botorch")},
        "baseline": dict(outcome.baseline),
        "bounds": outcome.bounds,
        "feasible": np.flatnonzero(outcome.feasible).tolist(),
        "front": [asdict(outcome.trials[number]) for number in outcome.front],
        "chosen": None if outcome.chosen is None else asdict(outcome.trials[outcome.chosen]),
        "objectives": OBJECTIVES,
        "reference": reference,
        "hypervolumes": outcome.hypervolumes,
    }


def front_points(outcome: Outcome) -> list[FrontPoint]:
    """The trials that did not fail, as points of the figure."""
    return [
        FrontPoint(
            metrics=trial.outcomes,
            feasible=bool(outcome.feasible[trial.number]),
            on_front=trial.number in outcome.front,
            chosen=trial.number == outcome.chosen,
        )
        for trial in outcome.trials
        if trial.outcomes
    ]


def metric_bounds(outcome: Outcome) -> dict[str, list[float]]:
    """The bounds by outcome, which may have several."""
    found: dict[str, list[float]] = {}
    for limit in outcome.tuning.limits:
        found.setdefault(limit.outcome, []).append(limit.bound(outcome.baseline))
    return found


def _draw(outcome: Outcome, path: Path) -> None:
    run = outcome.tuning.run
    pareto_figure(
        front_points(outcome),
        outcome.hypervolumes,
        path,
        baseline=outcome.baseline,
        bounds=metric_bounds(outcome),
        title=f"{run.method} on {task_name(run.task)}, validation split",
    )
