"""Long training at settings that invite trouble: it ends in numbers, or stops with a line that says where."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bayeslora.posterior import InducingPosterior, JitterWarning
from bayeslora.train import AdapterConfig, TrainingConfig, train
from bayeslora.train.errors import TrainingDiverged
from train.tiny import question, read_json, run_config, without_intervals, write_task

STEPS = int(os.environ.get("SOAK", "2000"))
"""Of every run; the tiny task has three steps in an epoch."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scales at their bounds": ({"init_sd_u": 0.1999, "init_lambda": 0.02999}, {}),
    "enormous scales": ({"init_sd_u": 9.99, "max_sd_u": 10.0, "init_lambda": 9.99, "max_lambda": 10.0}, {}),
    "vanishing scales": ({"init_sd_u": 1e-12, "max_sd_u": 1e-11, "init_lambda": 1e-12, "max_lambda": 1e-11}, {}),
    "tiny diagonals": ({"init_d": 1e-12}, {}),
    "tiny diagonals, unwhitened": ({"init_d": 1e-12, "whitened": False}, {}),
    "collinear points": ({"init_d": 1e-9}, {}),
    "learning rate 1": ({}, {"learning_rate": 1.0}),
    "learning rate 1e4": ({}, {"learning_rate": 1e4}),
    "learning rate 1e4, unclipped": ({"flow_depth": 2}, {"learning_rate": 1e4, "clip": 1e30}),
    "deep flow, fast": ({"flow_depth": 4}, {"learning_rate": 0.1, "rate_multipliers": {"flow": 100.0}}),
    "KL alone": ({}, {"kl_beta": 1e9}),
    "shared inducing matrices": ({"share_inducing": True}, {"learning_rate": 0.1}),
}


def collinear(posterior: InducingPosterior) -> None:
    """All inducing points of a factor are almost the same."""
    with torch.no_grad():
        for name, parameter in posterior.named_parameters():
            if name.startswith("z_"):
                parameter.copy_(parameter[:, :1] + 1e-7 * parameter)


@pytest.fixture(autouse=True)
def quick():
    with without_intervals():
        yield


def soak(out: Path, settings: dict[str, Any], training: dict[str, Any], **changes: Any) -> str:
    """Train, and look at everything that is left. Says how it ended."""
    told = {"batch_size": 4, "learning_rate": 0.01, "patience": 0, "epochs": -(-STEPS // 3)} | training
    config = run_config(
        adapter=AdapterConfig(rank=4, targets=("q_proj", "v_proj"), settings=settings),
        training=TrainingConfig(eval_every=told["epochs"], **told),
        **changes,
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = train(config, out)
        except (TrainingDiverged, ArithmeticError) as error:
            stop = str(error)
        else:
            stop = ""
    if stop:
        assert "step" in stop and not (out / "result.json").exists()
        return f"stopped: {stop}"
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert read_json(out / "result.json")["metrics"] == result["metrics"]  # JSON holds no NaN
    jitters = [str(it.message) for it in warned if issubclass(it.category, JitterWarning)]
    return f"finite, NLL {result['metrics']['nll']:.3f}" + (f"; {len(jitters)} jitter warnings" if jitters else "")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_long_training_at_adversarial_settings(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    if case == "collinear points":
        initialise = InducingPosterior._initialise

        def started(self: InducingPosterior, generator: torch.Generator) -> None:
            initialise(self, generator)
            collinear(self)

        monkeypatch.setattr(InducingPosterior, "_initialise", started)
    settings, training = CASES[case]
    ended = soak(tmp_path / "run", settings, training)
    record_property("ended", ended)
    print(f"{case}: {ended}")


@pytest.mark.slow
def test_long_training_on_questions_with_one_option(tmp_path: Path) -> None:
    """There is nothing to learn from them: their loss is 0, and so is its gradient."""
    rows = [question(k, choices=["yes"], answer=0) if k % 2 else question(k) for k in range(12)]
    task = write_task(tmp_path / "task", train=rows)
    try:
        ended = soak(tmp_path / "run", {}, {}, task=str(task))
    except ValueError as error:
        ended = f"refused: {error}"
    print(f"single-option rows: {ended}")
