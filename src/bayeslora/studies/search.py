"""Learning rates chosen on validation data, by the same search for every method that is trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bayeslora.methods import find_method
from bayeslora.studies.comparison import Comparison
from bayeslora.studies.plan import Chosen, Job, Pair, run_path
from bayeslora.studies.runner import Runner
from bayeslora.studies.study import task_name
from bayeslora.train.directory import RunDirectory


@dataclass
class RateSearch:
    """Tries factors of the learning rate on the first seed, for each task and trained method.

    Attributes:
        study: says which factors, and how far to go beyond them.
        out: directory of the study.
        runner: makes the runs.
        nlls: validation NLL by factor; infinite where a run failed.
        chosen: the factors of least validation NLL.
    """

    study: Comparison
    out: Path
    runner: Runner
    nlls: dict[Pair, dict[float, float]] = field(default_factory=dict)
    chosen: Chosen = field(default_factory=dict)

    def run(self) -> Chosen:
        """Try, and choose. Where there is only one factor, that is it."""
        pairs, factors = searched_pairs(self.study), self.study.rate_factors
        if len(factors) == 1:
            self.chosen = dict.fromkeys(pairs, factors[0])
            return self.chosen
        self._try(dict.fromkeys(pairs, factors), "search runs")
        for _ in range(self.study.rates_beyond):
            beyond = {pair: next_factor(nlls) for pair, nlls in self.nlls.items()}
            self._try({pair: (factor,) for pair, factor in beyond.items() if factor is not None}, "runs beyond those")
        for pair, nlls in self.nlls.items():
            self.runner.report.say(_told(pair, nlls))
        self.chosen = {pair: best_factor(nlls) for pair, nlls in self.nlls.items()}
        return self.chosen

    @property
    def record(self) -> dict[str, Any]:
        """What was chosen and why, as files hold it; nothing where a run failed."""
        tried = {
            _name(pair): {f"{f:g}": nlls[f] if math.isfinite(nlls[f]) else None for f in sorted(nlls)}
            for pair, nlls in self.nlls.items()
        }
        return {
            "chosen_rate_factors": {_name(pair): factor for pair, factor in self.chosen.items()},
            "rate_search": tried,
        }

    def _try(self, factors: Mapping[Pair, Sequence[float]], what: str) -> None:
        self.runner.run(search_jobs(self.study, self.out, factors), what)
        seed = self.study.seeds[0]
        for (task, method), wanted in factors.items():
            found = self.nlls.setdefault((task, method), {})
            found |= {f: _validation_nll(run_path(self.out, task, method, f, seed)) for f in wanted}


def searched_pairs(study: Comparison) -> list[Pair]:
    """Tasks and methods that have a learning rate to choose: those that are trained, and LoRA if others stand on it."""
    methods = {name: find_method(name) for name in study.method_names}
    trained = [name for name, method in methods.items() if method.make is None]
    if any(method.make is not None and method.loras({}) for method in methods.values()):
        trained = list(dict.fromkeys(("lora", *trained)))
    return [(task, method) for task in study.tasks for method in trained]


def search_jobs(study: Comparison, out: Path, factors: Mapping[Pair, Sequence[float]]) -> list[Job]:
    """The runs on the first seed with these factors."""
    seed = study.seeds[0]
    return [
        Job(
            study.config(task, method, seed, factor),
            run_path(out, task, method, factor, seed),
            name=f"{method} ×{factor:g}",
        )
        for (task, method), wanted in factors.items()
        for factor in wanted
    ]


def best_factor(nlls: Mapping[float, float]) -> float:
    """The factor of least NLL; of equal ones that nearest to 1."""
    return min(nlls, key=lambda factor: (nlls[factor], abs(math.log(factor))))


def next_factor(nlls: Mapping[float, float]) -> float | None:
    """The factor beyond the best one, as far from it as its neighbour is; none if that lies between others, or all failed."""
    tried, best = sorted(nlls), best_factor(nlls)
    if best not in (tried[0], tried[-1]) or not math.isfinite(nlls[best]):
        return None
    return best * best / (tried[1] if best == tried[0] else tried[-2])


def _name(pair: Pair) -> str:
    task, method = pair
    return f"{task_name(task)}/{method}"


def _told(pair: Pair, nlls: Mapping[float, float]) -> str:
    tried = sorted(nlls)
    shown = ", ".join(f"×{f:g}: {f'{nlls[f]:.4f}' if math.isfinite(nlls[f]) else 'failed'}" for f in tried)
    best = best_factor(nlls)
    end = ""
    if len(tried) > 2 and best in (tried[0], tried[-1]):
        end = f", the {'smallest' if best == tried[0] else 'largest'} that was tried"
    return f"{_name(pair)}: validation nll {shown}; ×{best:g} it is{end}"


def _validation_nll(path: Path) -> float:
    """Of the state that a run has kept; infinite if it failed."""
    directory = RunDirectory(path)
    if not directory.result.exists():
        return math.inf
    result = directory.read_result()
    seen = [record["validation"]["nll"] for record in result["history"]]
    return float(min(seen) if result["config"]["training"]["patience"] else seen[-1])
