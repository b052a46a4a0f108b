"""Presets decide every training setting that a run leaves open, and what a run says wins."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from bayeslora.methods import METHODS, registry
from bayeslora.methods.base import COMMON, Preset
from bayeslora.train import RunConfig, TrainingConfig, resolve

MACHINE = {"micro_batch", "cache_trunk", "gradient_checkpointing"}
"""What depends on the machine and not on the method."""


@pytest.mark.parametrize("name, value", [("patience", 5), ("clip", 0.25), ("eval_every", 2), ("epochs", 9), ("aim", 3)])
def test_a_preset_can_set_it_and_a_run_can_overrule_it(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Preset(training={**METHODS["lora"].presets["default"].training, name: value})
    method = replace(METHODS["lora"], presets={"default": own})
    monkeypatch.setitem(registry.METHODS, "lora", method)
    run = RunConfig(model="m", task="t", method="lora")
    assert getattr(resolve(run).training, name) == value
    given = replace(run, training=TrainingConfig(**{name: 1}))
    assert getattr(resolve(given).training, name) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_nothing_is_left_open(method: str, preset: str) -> None:
    training = resolve(RunConfig(model="m", task="t", method=method, preset=preset)).training
    assert [f.name for f in fields(TrainingConfig) if getattr(training, f.name) is None] == ["micro_batch"]


def test_every_setting_of_training_is_a_preset_s_to_set() -> None:
    """A default that is not ``None`` would count as given by the user, and hide what a preset says."""
    decided = {f.name for f in fields(TrainingConfig) if f.default is not None}
    assert decided == MACHINE - {"micro_batch"}
    assert COMMON.keys() <= {f.name for f in fields(TrainingConfig)}
