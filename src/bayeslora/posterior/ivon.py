"""IVON-LoRA: independent Gaussians on both factors, with widths from the curvature (methods entry 14)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.layers import LayerGroup, lora_start
from bayeslora.posterior.meanfield import GaussianFactors


@dataclass(frozen=True, kw_only=True)
class IvonConfig:
    """Settings of :class:`IvonPosterior` and of the natural-gradient steps that train it.

    Attributes:
        sample_size: effective sample size ``λ``: the larger it is, the narrower the posterior.
        hessian: initial diagonal ``h`` of the Hessian.
        damping: weight decay ``δ``, the precision of the prior over ``λ``; 0 is a flat prior.
        beta1: decay of the running mean of the gradients.
        beta2: decay of the running estimate of the Hessian.
        radius: clipping bound of every entry of a step, before the learning rate.
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
        """Initial ``σ = 1/√(λ (h + δ))``."""
        return (self.sample_size * (self.hessian + self.damping)) ** -0.5


class IvonPosterior(GaussianFactors):
    """``A ~ N(M_A, diag σ_A²)`` and ``B ~ N(M_B, diag σ_B²)`` with ``σ² = 1/(λ (h + δ))``.

    The widths are parameters, so that backpropagation gives ``Σ ε g``, from which :class:`bayeslora.train.ivon.Ivon` estimates
    the Hessian ``h``; no other optimiser may update them. The prior is part of those steps, so the loss has no KL term.
    """

    name = "ivon"
    config_class = IvonConfig
    capturable = True
    config: IvonConfig
    hints = TrainingHints({"mean_": "mean", "sd_": "scale"})

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"mean_{factor}_{group.key}", value)
                self._add(f"sd_{factor}_{group.key}", torch.full_like(value, self.config.start_sd))

    def _moments(self, factor: str, group: LayerGroup) -> tuple[Tensor, Tensor]:
        mean, sd = (self._tensor(f"{name}_{factor}_{group.key}") for name in ("mean", "sd"))
        return mean, self.scale * sd
