"""Optimiser steps: whose gradient reaches which parameters, and by which optimiser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bayeslora.train.optimise import clip_apart

Split = Mapping[str, Literal["kl", "both"]]
"""Kinds of parameters that SGD updates, along the KL only or along likelihood and KL."""


class Steps(ABC):
    """Takes optimiser steps.

    Attributes:
        optimiser: the stateful one; its state is saved with checkpoints.
        groups: all groups of parameters, whose learning rates follow the schedule.
    """

    optimiser: torch.optim.Optimizer
    groups: list[dict[str, Any]]

    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None

    @abstractmethod
    def backward(self, loss: Tensor, kl: Tensor) -> None:
        """Add the gradients of a part of the batch; both terms are already weighted."""

    def gradients(self) -> list[Tensor]:
        """All gradients of this step so far."""
        parameters = (parameter for group in self.groups for parameter in group["params"])
        return [p.grad for p in {id(p): p for p in parameters}.values() if p.grad is not None]

    @abstractmethod
    def step(self) -> Tensor:
        """Update the parameters; returns the norm of the gradient. If that is not finite, nothing is updated."""


class JointSteps(Steps):
    """AdamW on the whole objective.

    Args:
        groups: of parameters, from :func:`bayeslora.train.optimise.parameter_groups`.
        clip: bound of the gradient's norm, applied separately to posterior scales and the rest.
        epsilon: of AdamW.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], clip: float, epsilon: float = 1e-8) -> None:
        self.optimiser = torch.optim.AdamW(list(groups), eps=epsilon, fused=True)
        self.groups = self.optimiser.param_groups
        self._clip = clip

    def backward(self, loss: Tensor, kl: Tensor) -> None:
        """Backpropagate loss and KL together."""
        (loss + kl).backward()

    def step(self) -> Tensor:
        """Clip the gradients and take an AdamW step; returns their norm."""
        norm, scale_norm = clip_apart(self.groups, self._clip)
        _step_if_finite(self.optimiser, norm + scale_norm)
        return norm + scale_norm


class SplitSteps(Steps):
    """AdamW along the likelihood, plain SGD along the KL, as BLoB was published (methods entry 7).

    A posterior's scales are updated by SGD alone, along both. Only AdamW's gradient is clipped.

    Args:
        groups: of parameters, from :func:`bayeslora.train.optimise.parameter_groups`.
        clip: bound of the norm of AdamW's gradient.
        split: kinds that SGD updates, and along what.
        rate: learning rate of SGD, multiplied by every kind's multiplier.
        epsilon: of AdamW.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], clip: float, split: Split, rate: float, epsilon: float = 1e-8
    ) -> None:
        by_adamw = [group for group in groups if split.get(group["kind"]) != "both"]
        self.optimiser = torch.optim.AdamW(by_adamw, eps=epsilon, fused=True)
        own = [
            {**group, "lr": rate * group["multiplier"], "weight_decay": 0.0}
            for group in groups
            if group["kind"] in split
        ]
        self._sgd = torch.optim.SGD(own, fused=True)
        self.groups = [*self.optimiser.param_groups, *self._sgd.param_groups]
        self._clip = clip
        self._moved: list[nn.Parameter] = [p for group in self._sgd.param_groups for p in group["params"]]
        self._along_both = {id(p) for group in own if split[group["kind"]] == "both" for p in group["params"]}
        self._kl_gradients: list[Tensor] = []

    def zero_grad(self) -> None:
        """Clear the gradients of likelihood and KL."""
        super().zero_grad()
        self._kl_gradients = []

    def gradients(self) -> list[Tensor]:
        """The gradients of likelihood and KL so far."""
        return [*super().gradients(), *self._kl_gradients]

    def backward(self, loss: Tensor, kl: Tensor) -> None:
        """Backpropagate both terms separately. The KL goes first: it may share a part of the loss's graph."""
        found = torch.autograd.grad(kl, self._moved, retain_graph=True, materialize_grads=True)
        self._kl_gradients = list(map(torch.add, self._kl_gradients, found)) if self._kl_gradients else list(found)
        loss.backward()

    def step(self) -> Tensor:
        """Take the steps of AdamW and SGD. Both gradients are those at the parameters before the step."""
        norm, _ = clip_apart(self.optimiser.param_groups, self._clip)
        total = norm + torch.stack([gradient.abs().max() for gradient in self._kl_gradients]).max()
        _step_if_finite(self.optimiser, total)
        for parameter, gradient in zip(self._moved, self._kl_gradients, strict=True):
            if id(parameter) in self._along_both and parameter.grad is not None:
                gradient = gradient + parameter.grad
            parameter.grad = gradient
        _step_if_finite(self._sgd, total)
        return total


def _step_if_finite(optimiser: torch.optim.Optimizer, norm: Tensor) -> None:
    """Update the parameters if the gradient's norm is finite; the device decides, so the host need not wait."""
    optimiser.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    optimiser.step()
