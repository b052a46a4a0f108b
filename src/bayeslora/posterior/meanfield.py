"""BBB: independent Gaussians on every entry of both factors, trained by Bayes by Backprop (methods entry 6)."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.kl import KL, gaussian_kl
from bayeslora.posterior.layers import LayerGroup, lora_start, trainable_rows
from bayeslora.posterior.noise import Noise

BAND = 0.5
"""Width of the band of ``softplus⁻¹(σ)`` that initial standard deviations lie in."""


@dataclass(frozen=True, kw_only=True)
class MeanFieldConfig:
    """Settings of :class:`MeanFieldPosterior`.

    Attributes:
        prior_sd: standard deviation ``σ_p`` of every entry under the prior.
        init_sd: upper end of the initial standard deviations.
    """

    prior_sd: float = 0.2
    init_sd: float = 0.01

    def __post_init__(self) -> None:
        for name in ("prior_sd", "init_sd"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")


class GaussianFactors(Posterior):
    """Independent Gaussians on every entry of both factors, with means named ``mean_{factor}_{group}``."""

    @abstractmethod
    def _moments(self, factor: str, group: LayerGroup) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a factor of all layers of a group, posterior scale included."""

    def _draw(self, n: int, source: Noise) -> Factors:
        A, B = (
            tuple(source.gaussian(*self._moments(factor, group), n) for group in self.groups) for factor in ("A", "B")
        )
        return Factors(self.groups, A, B)

    def _mean(self) -> Factors:
        """Both factors are independent, so the mean of the product is the product of the means."""
        A, B = (tuple(self._moments(factor, group)[0].unsqueeze(1) for group in self.groups) for factor in ("A", "B"))
        return Factors(self.groups, A, B)

    def _start_from(self, factors: Factors) -> None:
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            own = self.get_parameter(f"mean_A_{group.key}")
            own.copy_(trainable_rows(A[:, 0], B[:, 0], own))
            self.get_parameter(f"mean_B_{group.key}").copy_(B[:, 0])


class MeanFieldPosterior(GaussianFactors):
    """``A ~ N(M_A, diag σ_A²)`` and ``B ~ N(M_B, diag σ_B²)`` with ``σ = softplus(ρ)``.

    The means start as in LoRA. As ``σ_B`` is not zero, the update is pure noise at first.
    """

    name = "meanfield"
    config_class = MeanFieldConfig
    partial = True
    capturable = True
    config: MeanFieldConfig
    hints = TrainingHints({"mean_": "mean", "rho_": "scale"})

    def _initialise(self, generator: torch.Generator) -> None:
        top = math.log(math.expm1(self.config.init_sd))
        for group in self.groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"mean_{factor}_{group.key}", value)
                self._add(f"rho_{factor}_{group.key}", top - BAND * torch.rand(value.shape, generator=generator))

    def _moments(self, factor: str, group: LayerGroup) -> tuple[Tensor, Tensor]:
        mean, rho = (self._tensor(f"{name}_{factor}_{group.key}") for name in ("mean", "rho"))
        return mean, self.scale * F.softplus(rho)

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        terms = [
            gaussian_kl(*self._moments(factor, group), self.config.prior_sd)
            for group in self.groups
            for factor in ("A", "B")
        ]
        total = torch.stack(terms).sum()
        return KL({"factors": total})
