"""Choose learning rate and epochs on validation questions, by the same search for every trained method.

The search has its own runs, which never read the test split.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.methods import find_method
from bayeslora.runs.config import RunConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.comparison import Comparison, Trial, read_trial
from bayeslora.studies.plan import Chosen, Job, Pair, path_below
from bayeslora.studies.runner import Runner
from bayeslora.studies.study import task_name


@dataclass
class Search:
    """Tries factors of the learning rate and numbers of epochs, for each task and trained method.

    Attributes:
        study: the trials, their seeds, and how far to extend the factors.
        out: directory of the study.
        runner: executes the runs.
        nlls: validation NLL by trial, mean over the seeds; infinite if a run failed.
        chosen: the trials of least validation NLL.
    """

    study: Comparison
    out: Path
    runner: Runner
    nlls: dict[Pair, dict[Trial, float]] = field(default_factory=dict)
    chosen: Chosen = field(default_factory=dict)

    def run(self) -> Chosen:
        """Run the trials and choose the best. A single trial, or one that is known, is chosen without a run."""
        trials, known = trials_of(self.study), {name: read_trial(str(it)) for name, it in self.study.trials.items()}
        pairs = searched_pairs(self.study)
        settled = {pair: known.get(pair[1], trials[0]) for pair in pairs if pair[1] in known or len(trials) == 1}
        pairs = [pair for pair in pairs if pair not in settled]
        self._try(dict.fromkeys(pairs, trials), "search runs")
        for _ in range(self.study.rates_beyond):
            beyond = {pair: next_trial(nlls) for pair, nlls in self.nlls.items()}
            self._try(
                {pair: (trial,) for pair, trial in beyond.items() if trial is not None},
                "runs with factors beyond those",
            )
        for pair, nlls in self.nlls.items():
            self.runner.report.say(_told(pair, nlls))
        self.chosen = settled | {pair: best_trial(nlls) for pair, nlls in self.nlls.items()}
        return self.chosen

    @property
    def record(self) -> dict[str, Any]:
        """JSON-compatible record of the choice and the NLLs, which are ``None`` where a run failed."""
        tried = {
            _name(pair): {it.label: nlls[it] if math.isfinite(nlls[it]) else None for it in _in_order(nlls)}
            for pair, nlls in self.nlls.items()
        }
        epochs = {_name(pair): it.epochs for pair, it in self.chosen.items() if it.epochs is not None}
        return {
            "chosen_rate_factors": {_name(pair): it.factor for pair, it in self.chosen.items()},
            **({"chosen_epochs": epochs} if epochs else {}),
            "rate_search": tried,
        }

    def _try(self, trials: Mapping[Pair, Sequence[Trial]], what: str) -> None:
        self.runner.run(search_jobs(self.study, self.out, trials), what)
        for pair, wanted in trials.items():
            self.nlls.setdefault(pair, {}).update({trial: self._nll(pair, trial) for trial in wanted})

    def _nll(self, pair: Pair, trial: Trial) -> float:
        """Validation NLL of a trial, mean over the seeds."""
        paths = [_search_path(self.out, *pair, trial, seed) for seed in self.study.search_seeds]
        whole = all(RunDirectory(path).result.exists() for path in paths)
        if self.runner.execution.workers == 0 and not whole:
            return self._recorded_nll(pair, trial)
        return sum(map(_validation_nll, paths)) / len(paths)

    def _recorded_nll(self, pair: Pair, trial: Trial) -> float:
        """The same of a trial whose runs have failed or were removed, from the last table."""
        try:
            record = json.loads((self.out / "table.json").read_text(encoding="utf-8"))
            nll = record["rate_search"][_name(pair)][trial.label]
            known = record["study"]["search_seeds"] == list(self.study.search_seeds)
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise InputError(
                f"{self.out}: the search is not done, as it lacks {_name(pair)} {trial}; give the command without --workers 0, "
                "or what to choose with --trials"
            )
        return math.inf if nll is None else float(nll)


def trials_of(study: Comparison) -> tuple[Trial, ...]:
    """Trials of every method; without epochs in the study each method keeps its own."""
    epochs: Sequence[int | None] = study.search_epochs or (None,)
    return tuple(Trial(factor, some) for some in epochs for factor in study.rate_factors)


def searched_pairs(study: Comparison) -> list[Pair]:
    """Tasks and methods with a learning rate to choose: trained methods, and LoRA if others build on it."""
    methods = {name: find_method(name) for name in study.method_names}
    trained = [name for name, method in methods.items() if method.fit_post_hoc is None]
    if any(method.fit_post_hoc is not None and method.loras({}) for method in methods.values()):
        trained = list(dict.fromkeys(("lora", *trained)))
    return [(task, method) for task in study.tasks for method in trained]


def search_jobs(study: Comparison, out: Path, trials: Mapping[Pair, Sequence[Trial]]) -> list[Job]:
    """The runs of these trials, with every seed of the search."""
    return [
        Job(
            _on_validation(study.config(task, method, seed, trial)),
            _search_path(out, task, method, trial, seed),
            name=f"{method} {trial}",
        )
        for (task, method), wanted in trials.items()
        for trial in wanted
        for seed in study.search_seeds
    ]


def best_trial(nlls: Mapping[Trial, float]) -> Trial:
    """The trial of least NLL; ties are broken by the factor nearest to 1, then by the fewest epochs."""
    return min(nlls, key=lambda it: (nlls[it], abs(math.log(it.factor)), it.epochs or 0))


def next_trial(nlls: Mapping[Trial, float]) -> Trial | None:
    """The next factor beyond the best one, with its epochs and the same spacing; ``None`` if the best is not at an end, or all
    failed."""
    best = best_trial(nlls)
    tried = sorted(it.factor for it in nlls if it.epochs == best.epochs)
    if best.factor not in (tried[0], tried[-1]) or not math.isfinite(nlls[best]):
        return None
    neighbour = tried[1] if best.factor == tried[0] else tried[-2]
    return replace(best, factor=best.factor * best.factor / neighbour)


def _on_validation(config: RunConfig) -> RunConfig:
    """The run on the validation split, without steps that only serve the report."""
    return replace(config, report_split="validation", prediction=replace(config.prediction, solutions=0))


def _search_path(out: Path, task: str, method: str, trial: Trial, seed: int) -> Path:
    return path_below(out / "search", task, method, trial, seed)


def _name(pair: Pair) -> str:
    task, method = pair
    return f"{task_name(task)}/{method}"


def _in_order(nlls: Mapping[Trial, float]) -> list[Trial]:
    return sorted(nlls, key=lambda it: (it.epochs or 0, it.factor))


def _told(pair: Pair, nlls: Mapping[Trial, float]) -> str:
    shown = ", ".join(f"{it}: {f'{nlls[it]:.4f}' if math.isfinite(nlls[it]) else 'failed'}" for it in _in_order(nlls))
    best = best_trial(nlls)
    tried, end = sorted({it.factor for it in nlls}), ""
    if len(tried) > 2 and best.factor in (tried[0], tried[-1]):
        end = f", the {'smallest' if best.factor == tried[0] else 'largest'} factor that was tried"
    return f"{_name(pair)}: validation nll {shown}; chosen: {best}{end}"


def _validation_nll(path: Path) -> float:
    """Validation NLL of the final state of a run; infinite if it failed."""
    directory = RunDirectory(path)
    if not directory.result.exists():
        return math.inf
    result = directory.read_result()
    seen = [record["validation"]["nll"] for record in result.history or ()]
    return float(min(seen) if result.config["training"]["patience"] else seen[-1])
