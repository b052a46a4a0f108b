"""What drawing in the upper layers only costs and saves: quality against the time of a prediction.

python benchmarks/frontier.py RUN --trained 0.5=RUN2 0.25=RUN3 --data-dir DATA --out result.json

RUN is fully stochastic and drawn above each cut, with the mean below (late draws). Runs given as ``--trained`` were trained
with ``--stochastic-layers CUT``. The scale of the posterior is chosen for every cut on the validation split, by the NLL at
the best temperature there; all metrics but that NLL are those of the test split, without a temperature. Times are relative to
one pass with the posterior mean, taken in turns in one process, and include all layers, also where a run keeps the output of
its frozen ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bayeslora import load_run
from bayeslora.bench.timing import Timing, time_in_turns
from bayeslora.predict.calibrate import DEFAULT_SCALES, choose_scale
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.predictors import make_predictor, make_scorer
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, load_task, require_gold

METRICS = ("acc", "nll", "ece", "epistemic")


@dataclass
class Candidate:
    """A way to predict: a run, and the layers in which its draws differ."""

    form: str
    cut: str
    run: TrainedModel
    predictor: Predictor
    scale: float = 1.0
    validation_nll: float = float("nan")

    def choose_scale(self, items: Sequence[Item]) -> None:
        """The scale of least NLL on these questions."""
        encoded = self.predictor.encode(items)

        def scores(scale: float) -> np.ndarray:
            self.run.model.base_model.posterior_scale = scale
            return self.predictor.score(encoded).predictive

        scales = DEFAULT_SCALES if self.predictor.sampling.samples else (1.0,)
        choice = choose_scale(scores, require_gold(items), scales)
        self.scale, self.validation_nll = choice.scale, choice.nll

    def predict(self, items: Sequence[Item], encoded: Sequence[Any]) -> Any:
        """Predictions at the chosen scale."""
        self.run.model.base_model.posterior_scale = self.scale
        return self.predictor(items, encoded)

    def predict_from_the_start(self, items: Sequence[Item], encoded: Sequence[Any]) -> Any:
        """The same, with nothing kept from earlier predictions but the draws."""
        plain = Scorer(self.run.model, self.predictor.scorer.pad_id)
        return replace(self, predictor=replace(self.predictor, scorer=plain)).predict(items, encoded)

    def record(self, metrics: dict[str, float], timing: Timing, base: Timing) -> dict[str, Any]:
        """As it is written."""
        middle, low, high = timing.ratio_to(base)
        row = {"form": self.form, "cut": self.cut, "scale": self.scale, "validation_nll": self.validation_nll}
        return row | {name: metrics[name] for name in METRICS} | {"cost": middle, "cost_quartiles": [low, high]}


def candidates(given: argparse.Namespace) -> list[Candidate]:
    """The mean of the run, its late draws, and the runs trained with a cut."""
    run = load_run(given.run, raw=True)

    def predictor(run: TrainedModel) -> Predictor:
        made = make_predictor(make_scorer(run.model, run.loaded, run.config, None), run.loaded, run.config)
        return made.with_draws(samples=given.samples)

    own = predictor(run)
    found = [Candidate("mean", "none", run, own.with_draws(samples=0))]
    found += [Candidate("late draws", cut, run, own.with_draws(layers=cut)) for cut in given.cuts]
    for text in given.trained:
        cut, _, path = text.partition("=")
        partial = load_run(path, raw=True)
        found.append(Candidate("trained", cut, partial, predictor(partial)))
    return found


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Quality and time of every candidate."""
    ways = candidates(given)
    config = ways[0].run.config
    task = load_task(config.task, given.data_dir)
    validation, test = task.load("validation").items, task.load("test").items[: given.questions]
    for way in ways:
        way.choose_scale(validation)
    encoded = ways[0].predictor.encode(test)
    metrics = [way.predict(test, encoded).metrics() for way in ways]
    actions = {
        f"{way.form} {way.cut}": lambda way=way: way.predict_from_the_start(test[: given.timed], encoded[: given.timed])
        for way in ways
    }
    device = ways[0].predictor.scorer.device
    timings = list(time_in_turns(actions, device, repeats=given.repeats, warmup=1).values())
    return {
        "schema": 1,
        "task": config.task,
        "samples": given.samples,
        "questions": {"validation": len(validation), "test": len(test), "timed": min(given.timed, len(test))},
        "rows": [
            way.record(figures, timing, timings[0]) for way, figures, timing in zip(ways, metrics, timings, strict=True)
        ],
        "environment": describe_environment(device),
    }


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--trained", nargs="*", default=[], metavar="CUT=RUN")
    parser.add_argument("--cuts", nargs="+", default=["all", "0.75", "0.5", "0.25", "0.125"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=None, help="of the test split; all by default")
    parser.add_argument("--timed", type=int, default=512, help="questions that are timed")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    record = measure(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for row in record["rows"]:
        print(
            "  ".join(f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in row.items())
        )


if __name__ == "__main__":
    main()
