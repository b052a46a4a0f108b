"""The optimisers by name. To add one, add a subclass of :class:`Steps` and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.holder import find_holder
from bayeslora.train.ivon import IvonSteps
from bayeslora.train.optimise import parameter_groups
from bayeslora.train.steps import JointSteps, SplitSteps, Steps

Groups = Sequence[dict[str, Any]]
Setting = Callable[[str], Any]
"""Looks up a training setting by name."""


def _adamw(groups: Groups, setting: Setting, model: nn.Module) -> Steps:
    return JointSteps(groups, setting("clip"), setting("adam_epsilon"))


def _split(groups: Groups, setting: Setting, model: nn.Module) -> Steps:
    split = find_any_holder(model).split_kinds()
    return SplitSteps(groups, setting("clip"), split, setting("kl_rate"), setting("adam_epsilon"))


def _ivon(groups: Groups, setting: Setting, model: nn.Module) -> Steps:
    return IvonSteps(groups, find_holder(model).posterior("default").config)


OPTIMISERS: Mapping[str, Callable[[Groups, Setting, nn.Module], Steps]] = {
    "adamw": _adamw,
    "split": _split,
    "ivon": _ivon,
}


def make_steps(model: nn.Module, setting: Setting) -> Steps:
    """Create the steps of the configured optimiser, over all trainable parameters of a model."""
    rate, decay, multipliers = (setting(name) for name in ("learning_rate", "weight_decay", "rate_multipliers"))
    return OPTIMISERS[setting("optimiser")](parameter_groups(model, rate, decay, multipliers), setting, model)
