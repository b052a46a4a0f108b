"""IVON-LoRA: independent Gaussians on both factors, whose widths follow the curvature (methods card 14)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayeslora.posterior.base import Factors, Posterior
from bayeslora.posterior.layers import LayerGroup, lora_start


@dataclass(frozen=True, kw_only=True)
class IvonConfig:
    """Settings of :class:`IvonPosterior`, and of the natural-gradient steps that it is trained by.

    Attributes:
        sample_size: effective sample size ``λ``: the larger it is, the narrower the posterior.
        hessian: diagonal ``h`` of the Hessian at the start.
        damping: weight decay ``δ``, the precision of the prior over ``λ``; 0 is a flat prior.
        beta1: how slowly the mean gradient follows the gradients.
        beta2: how slowly the Hessian follows its estimates.
        radius: bound of every entry of a step, before the learning rate.
    """

    sample_size: float = 1e6
    hessian: float = 1e-3
    damping: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99999
    radius: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("sample_size", "hessian", "radius"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not (math.isfinite(self.damping) and self.damping >= 0):
            raise ValueError(f"damping must be finite and not negative, got {self.damping}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    @property
    def start_sd(self) -> float:
        """``σ = 1/√(λ (h + δ))`` at the start."""
        return (self.sample_size * (self.hessian + self.damping)) ** -0.5


class IvonPosterior(Posterior):
    """``A ~ N(M_A, diag σ_A²)`` and ``B ~ N(M_B, diag σ_B²)`` with ``σ² = 1/(λ (h + δ))``.

    The widths are parameters, so that backpropagation gives ``Σ ε g``, from which :class:`bayeslora.train.ivon.Ivon` estimates
    the Hessian ``h``; no other optimiser may move them. The prior is part of those steps, so there is no KL beside the loss.
    """

    config_class = IvonConfig
    capturable = True
    config: IvonConfig
    parameter_kinds: ClassVar = {"mean_": "mean", "sd_": "scale"}

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"mean_{factor}_{group.key}", value)
                self._add(f"sd_{factor}_{group.key}", torch.full_like(value, self.config.start_sd))

    def _moments(self, factor: str, group: LayerGroup) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a factor of all layers of a group, posterior scale included."""
        mean, sd = (self._tensor(f"{name}_{factor}_{group.key}") for name in ("mean", "sd"))
        return mean, self.scale * sd

    def _draw(self, n: int, generator: torch.Generator | None) -> Factors:
        A, B = (
            tuple(self._gaussian(*self._moments(factor, group), n, generator) for group in self.groups)
            for factor in ("A", "B")
        )
        return Factors(self.groups, A, B)

    def _mean(self) -> Factors:
        """Both factors are independent, so the mean of the product is the product of the means."""
        A, B = (tuple(self._moments(factor, group)[0].unsqueeze(1) for group in self.groups) for factor in ("A", "B"))
        return Factors(self.groups, A, B)

    def _start_from(self, factors: Factors) -> None:
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            self.get_parameter(f"mean_A_{group.key}").copy_(A[:, 0])
            self.get_parameter(f"mean_B_{group.key}").copy_(B[:, 0])
