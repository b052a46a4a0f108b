"""The verb that searches for settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bayeslora.cli.common import StudyOptions, Unnamed, print_result, quoted
from bayeslora.progress import reporter
from bayeslora.runs.config import resolve
from bayeslora.tasks.registry import check_task_names
from bayeslora.train.errors import RunsFailed
from bayeslora.tuning.config import Tuning


@dataclass(frozen=True, kw_only=True)
class Tune(StudyOptions):
    """Search for settings that optimise ECE, NLL and accuracy jointly, within constraints, on validation data only.

    Constrained Bayesian optimisation: first some runs at evenly spread settings, then repeatedly the settings with the largest
    expected improvement under a model of all outcomes. The same command resumes an interrupted search, and more --trials
    extend it. Needs BoTorch: pip install botorch.

        bayeslora tune --model M --task T --constraints 'acc>=lora-0.005' --trials 32 --out DIR --apply
    """

    tuning: Unnamed[Tuning]
    out: Path
    """Directory for the trials, the table, the front (JSON and figure) and the chosen settings."""
    apply: bool = False
    """Also train the chosen settings and evaluate them on the test split."""

    def run(self) -> None:
        """Search, with the table and the chosen settings on stdout."""
        check_task_names([self.tuning.run.task])
        resolve(self.tuning.run)
        from bayeslora.tuning.tune import tune

        with reporter(quiet=self.quiet) as report:
            tuned = tune(
                self.tuning,
                self.out,
                self.execution(report),
                apply=self.apply,
            )
        if self.json:
            record = json.loads((self.out / "tuned.json").read_text(encoding="utf-8"))
            print(json.dumps({**record, "applied": tuned.applied}, default=dict))
        else:
            print(tuned.text)
            if tuned.applied is not None:
                print(f"chosen run ({self.out / 'chosen'}):")
                print_result(tuned.applied, quiet=self.quiet)
            elif tuned.outcome.chosen is not None:
                print(f"next: bayeslora train --config {quoted(self.out / 'chosen.json')} --out my-run")
        if tuned.outcome.chosen is None:
            why = "all trials failed" if tuned.outcome.all_failed else "no trial keeps all constraints"
            raise RunsFailed(f"{why}; see {self.out / 'trials.md'}")
