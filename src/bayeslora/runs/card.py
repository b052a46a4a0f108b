"""The model card of a run: ``README.md`` beside its adapter, in the format of the hub. It names no path of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from bayeslora import __version__
from bayeslora.hub_names import has_hub_form, is_hub_id
from bayeslora.runs.result import RunResult

SHOWN = {
    "acc": "accuracy",
    "f1": "word overlap (F1)",
    "nll": "NLL, nats",
    "ece": "calibration error (ECE)",
    "brier": "Brier score",
    "auroc": "AUROC of the confidence",
    "aurc": "area under risk and coverage",
}
"""Metrics that the card shows, with what they are called there."""


def make_card(result: RunResult, base_model: str | None, figure: str | None = None) -> str:
    """The card of a finished run.

    Args:
        result: of the run.
        base_model: its name as the adapter's configuration has it.
        figure: name of the file with its reliability diagram, beside the card.
    """
    config = result.config
    method, task = str(config["method"]), result.title or public_name(str(config["task"]))
    base = base_model if is_hub_id(base_model) else None
    parts = [
        f"---\n{yaml.safe_dump(_front(method, task, base), sort_keys=False, allow_unicode=True)}---",
        f"# {method} on {task}",
        f"A LoRA adapter with a distribution over its weights, trained with bayeslora {__version__}: "
        f"method `{method}`, base model {f'`{base}`' if base else 'a local one'}, task `{task}`"
        f"{f' ({result.kind})' if result.kind else ''}, seed {result.seed}.",
        _in_words(result),
        _table(result),
        "" if figure is None else f"![{_alternative(result)}]({figure})",
        USE if base else f"{USE}\n\n{LOCAL_BASE}",
        _training(config, result.counts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


DATA_SUFFIXES = (".gz", ".jsonl", ".json", ".csv", ".parquet", ".txt")


def public_name(name: str) -> str:
    """A task or model without directories of this machine."""
    if is_hub_id(name):
        return name
    path = PurePath(name)
    while path.suffix in DATA_SUFFIXES:
        path = path.with_suffix("")
    return path.name or name


def _front(method: str, task: str, base: str | None) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "peft", "pipeline_tag": "text-generation"}
    if base:
        front["base_model"] = base
    if has_hub_form(task):
        front["datasets"] = [task]
    return {**front, "tags": ["bayeslora", method, "lora", "uncertainty-estimation", "calibration"]}


def _in_words(result: RunResult) -> str:
    """What the figures say, in a sentence."""
    sides = [("As trained", result.metrics)]
    if result.calibrated is not None:
        sides.append(("Calibrated on the validation split", result.calibrated["metrics"]))
    said = [
        f"{who}, it says it is {figures['confidence']:.0%} sure on average, and is right in {figures['acc']:.0%} of the cases."
        for who, figures in sides
        if "confidence" in figures and "acc" in figures
    ]
    return " ".join(said)


def _table(result: RunResult) -> str:
    after = None if result.calibrated is None else result.calibrated["metrics"]
    names = [name for name in SHOWN if name in result.metrics]
    if not names:
        return ""
    rows = [f"| {result.split} split | as trained |" + (" calibrated |" if after else "")]
    rows.append("|---|---:|" + ("---:|" if after else ""))
    for name in names:
        cells = [result.metrics[name], *([after.get(name)] if after else [])]
        shown = " | ".join("" if cell is None else f"{cell:.4f}" for cell in cells)
        rows.append(f"| {SHOWN[name]} | {shown} |")
    return "\n".join(rows)


def _alternative(result: RunResult) -> str:
    """What the reliability diagram shows, for those who do not see it."""
    sides = {"as trained": result.metrics, "calibrated": (result.calibrated or {}).get("metrics", {})}
    errors = " and ".join(f"{side} {figures['ece']:.3f}" for side, figures in sides.items() if "ece" in figures)
    shown = f"Reliability diagram of the {result.split} split: accuracy against confidence"
    return f"{shown}, with a calibration error (ECE) of {errors}" if errors else shown


USE = """## How to use it

```python
from bayeslora import load_run

model = load_run("DIRECTORY or org/name")  # predictions, generation and confidence from several draws
```

With PEFT alone, at the mean of the distribution:

```python
import bayeslora  # registers the adapter with PEFT
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("DIRECTORY or org/name")
```"""

LOCAL_BASE = "The base model has no name on the hub: load it yourself, and use `PeftModel.from_pretrained`."


def _training(config: Mapping[str, Any], counts: Mapping[str, Any]) -> str:
    adapter, training = config.get("adapter", {}), config.get("training", {})
    sizes = ", ".join(
        f"{split} {next(iter(part.values()))}" for split, part in counts.items() if isinstance(part, Mapping) and part
    )
    settings = {name: adapter.get(name) for name in ("rank", "alpha", "targets", "layers")}
    settings |= {name: training.get(name) for name in ("epochs", "batch_size", "learning_rate")}
    shown = "\n".join(
        f"- {name}: {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in settings.items()
        if value is not None
    )
    return f"## Training\n\n{f'Examples: {sizes}.' if sizes else ''}\n\n{shown}".replace("\n\n\n", "\n\n")
