"""A complete example in minutes on two slow CPU cores: LoRA and Bayesian-LoRA on SmolLM2 and the embedded task.

It is cheap by design: options share short prompts, only upper layers are adapted, the frozen layers below are computed once
for all epochs, both methods and all draws, and questions of similar length are batched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bayeslora.figures import reliability_figure
from bayeslora.models import load_model
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.predict.trunk import TrunkCache
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.config import AdapterConfig, RunConfig, TrainingConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.train.run import RunContext, train

METHODS = ("lora", "bayesian-lora")
EPOCHS = 12
COLUMNS = {"acc": "ACC", "nll": "NLL", "ece": "ECE", "distance_to_truth": "distance to truth"}


@dataclass(frozen=True)
class Quickstart:
    """Both results by method, and their description."""

    results: dict[str, RunResult]
    figure: Path
    text: str


def quickstart_config(method: str, seed: int) -> RunConfig:
    """The run of one method with its defaults; all else is the same for both.

    Many passes over few questions without early stopping are a typical cause of overconfident models.
    """
    return RunConfig(
        model="smollm2",
        task="urns",
        method=method,
        seed=seed,
        adapter=AdapterConfig(layers="last:8"),
        training=TrainingConfig(
            epochs=EPOCHS,
            batch_size=8,
            patience=0,
            eval_every=EPOCHS,
            cache_trunk=True,
        ),
    )


def quickstart(
    out: Path, *, device: str = "auto", seed: int = 0, force: bool = False, report: Reporter | None = None
) -> Quickstart:
    """Run or resume both methods in ``out``; draws the figure and writes the table."""
    report = report or Silent()
    place = RunContext(device=device, report=report, trunk=TrunkCache())
    results = {}
    for method in METHODS:
        report.say(f"{method}:")
        directory = out / method
        if place.loaded is None and (force or not RunDirectory(directory).result.exists()):
            place = replace(place, loaded=load_model("smollm2", device=device))
        results[method] = train(quickstart_config(method, seed), directory, place, force=force)
    figure = reliability_figure(
        {method: read_predictions(out / method / "predictions.jsonl.gz")[1:] for method in METHODS},
        out / "reliability.png",
        title="SmolLM2-135M on draws from urns",
    )
    return Quickstart(results, figure, _describe(results, out, figure))


def metrics_table(results: Mapping[str, RunResult]) -> str:
    """Table with a row per method and one for it after calibration, and a column per main metric."""
    rows = {}
    for method, result in results.items():
        rows[method] = result.metrics
        if result.calibrated is not None:
            rows[f"{method}, calibrated"] = result.calibrated["metrics"]
    width = max(map(len, rows))
    head = f"{'':{width}}  " + "  ".join(f"{title:>6}" for title in COLUMNS.values())
    lines = [
        f"{name:{width}}  " + "  ".join(f"{row[it]:{max(6, len(title))}.3f}" for it, title in COLUMNS.items())
        for name, row in rows.items()
    ]
    return "\n".join([head, *lines])


def _describe(results: Mapping[str, RunResult], out: Path, figure: Path) -> str:
    truth = next(iter(results.values())).metrics["truth_entropy"]
    questions = next(iter(results.values())).counts["test"]["questions"]
    run = out / "bayesian-lora"
    return f"""
SmolLM2-135M, {questions} urns that neither method has seen (no model can expect an NLL below {truth:.3f}).
Both learned the same urns, {EPOCHS} times over, each at its own learning rate and without early stopping:

{metrics_table(results)}

figure    {figure}
adapters  {", ".join(str(out / method / "adapter") for method in results)}

Next:
  bayeslora predict {run} --bare --question "Balls in the bag: red blue blue blue. Picked at random:" --choice red --choice blue
  bayeslora calibrate {run} --coverage 0.5     let it abstain when it is not sure
  bayeslora train --model smollm2 --task your-questions.jsonl --layers last:8 --cache-trunk --out my-run"""
