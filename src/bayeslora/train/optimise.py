"""Parameter groups, learning-rate schedules and separate gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslora.adapter.foreign import ForeignHolder
from bayeslora.adapter.holder import PosteriorHolder

Schedule = Literal["linear", "cosine", "cyclic", "multistep", "constant"]


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Every trainable parameter by name with its kind (see :meth:`Posterior.kind`)."""
    kinds = {name: "weights" for name, parameter in model.named_parameters() if parameter.requires_grad}
    for path, holder in model.named_modules():
        if isinstance(holder, ForeignHolder):
            kinds = {name: holder.kind(name) for name in kinds}
        if isinstance(holder, PosteriorHolder):
            for name in kinds:
                adapter, _, tensor = name.removeprefix(f"{path}.bayeslora_posterior.").partition(".")
                if name.startswith(f"{path}.") and tensor:
                    kinds[name] = holder.posterior(adapter).kind(tensor)
    return kinds


def multiplier_of(kind: str, multipliers: Mapping[str, float]) -> float:
    """Learning-rate multiplier of a kind; ``weights`` stands for all point estimates without one of their own."""
    others = multipliers.get("weights", 1.0) if kind.startswith("weights") else 1.0
    return multipliers.get(kind, others)


def parameter_groups(
    model: nn.Module,
    learning_rate: float = 1.0,
    weight_decay: float = 0.0,
    multipliers: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser, one for each kind.

    Only point estimates are decayed: on a posterior's scales, decay would work against the KL.
    """
    kinds, parameters = parameter_kinds(model), dict(model.named_parameters())
    return [
        {
            "params": [parameters[name] for name, own in kinds.items() if own == kind],
            "names": [name for name, own in kinds.items() if own == kind],
            "kind": kind,
            "multiplier": multiplier_of(kind, multipliers),
            "lr": learning_rate * multiplier_of(kind, multipliers),
            "weight_decay": weight_decay if kind.startswith("weights") else 0.0,
        }
        for kind in dict.fromkeys(kinds.values())
    ]


def clip_apart(groups: Sequence[Mapping[str, Any]], bound: float) -> tuple[Tensor, Tensor]:
    """Clip the gradient of posterior scales and that of all other parameters separately; returns both norms.

    The KL's gradient on the scales is larger than the data's by orders of magnitude. Under a common norm it would shrink the
    data's gradient to almost nothing.
    """
    others = [p for group in groups if group["kind"] != "scale" for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(others, bound), clip_scales(groups, bound)


def clip_scales(groups: Sequence[Mapping[str, Any]], bound: float) -> Tensor:
    """Clip the gradient of posterior scales alone; returns its norm."""
    scales = [p for group in groups if group["kind"] == "scale" for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(scales, bound)


def rate_factor(
    schedule: Schedule,
    step: int,
    *,
    steps: int,
    steps_per_epoch: int,
    warmup: float,
    milestones: Sequence[int],
    cycles: int = 1,
) -> float:
    """Learning rate at a step, counted from 0, relative to its full value.

    A pure function of the step, so that a resumed run needs no scheduler state.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if schedule == "cyclic":
        return 0.5 * (1.0 + math.cos(math.pi * (done * cycles % 1.0)))
    if schedule == "multistep":
        return 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in milestones)
    return 1.0
