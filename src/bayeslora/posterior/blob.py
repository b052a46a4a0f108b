"""BLoB: a mean-field Gaussian on the factor ``A``, a point on ``B`` (methods entry 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.inner import Flipout
from bayeslora.posterior.kl import KL, gaussian_kl
from bayeslora.posterior.layers import LayerGroup, lora_start, trainable_rows
from bayeslora.posterior.noise import Noise

FlipoutMode = Literal["token", "sequence", "off"]


@dataclass(frozen=True, kw_only=True)
class BlobConfig:
    """Settings of :class:`BlobPosterior`.

    Attributes:
        prior_sd: standard deviation ``σ_p`` of the entries of ``A`` under the prior.
        init_root: upper end ``ε`` of the initial roots ``G``, which lie in ``[ε/√2, ε]``.
        flipout: unit with its own random signs in training; ``off`` gives all rows of a step the same weights.
    """

    prior_sd: float = 0.2
    init_root: float = 0.05
    flipout: FlipoutMode = "token"

    def __post_init__(self) -> None:
        for name in ("prior_sd", "init_root"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if self.flipout not in get_args(FlipoutMode):
            raise ValueError(f"flipout must be one of {', '.join(get_args(FlipoutMode))}, got {self.flipout!r}")


class BlobPosterior(Posterior):
    """``A ~ N(M, diag Ω²)`` with ``Ω = G ⊙ G``, and ``B`` a point.

    With ``B`` fixed the update ``B A`` is Gaussian, and its KL to the prior that ``B`` induces is that of ``A``. In
    training the noise is spread over the rows by flipout; in evaluation a draw is one network.
    """

    name = "blob"
    config_class = BlobConfig
    partial = True
    config: BlobConfig
    hints = TrainingHints({"mean_": "mean", "root_": "scale", "B_": "weights_b"}, split={"mean": "kl", "scale": "both"})

    def _initialise(self, generator: torch.Generator) -> None:
        low, high = self.config.init_root / math.sqrt(2.0), self.config.init_root
        for group in self.groups:
            start = lora_start(group, generator)
            roots = low + (high - low) * torch.rand(start["A"].shape, generator=generator)
            self._add(f"mean_A_{group.key}", start["A"])
            self._add(f"root_A_{group.key}", roots)
            self._add(f"B_{group.key}", start["B"])

    def _moments(self, group: LayerGroup) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of ``A`` of all layers of a group, posterior scale included."""
        mean, root = (self._tensor(f"{name}_A_{group.key}") for name in ("mean", "root"))
        return mean, self.scale * root.square()

    def _draw(self, n: int, source: Noise) -> Factors:
        if self.training and self.config.flipout != "off":
            return self._flipout(n, self.config.flipout, source)
        A = tuple(source.gaussian(*self._moments(group), n) for group in self.groups)
        return Factors(self.groups, A, self._points(n))

    def _flipout(self, n: int, per: Literal["token", "sequence"], source: Noise) -> Factors:
        moments = [self._moments(group) for group in self.groups]
        noises = [source.gaussian(torch.zeros_like(mean), sd, n) for mean, sd in moments]
        means = tuple(mean.unsqueeze(1).expand(-1, n, -1, -1) for mean, _ in moments)
        factors = Factors(self.groups, means, self._points(n))
        return replace(factors, inners=tuple(Flipout(tensors=(noise,), per=per) for noise in noises))

    def _points(self, n: int) -> tuple[Tensor, ...]:
        return tuple(self._tensor(f"B_{group.key}").unsqueeze(1).expand(-1, n, -1, -1) for group in self.groups)

    def _mean(self) -> Factors:
        return Factors(self.groups, tuple(self._moments(g)[0].unsqueeze(1) for g in self.groups), self._points(1))

    def _start_from(self, factors: Factors) -> None:
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            own = self.get_parameter(f"mean_A_{group.key}")
            own.copy_(trainable_rows(A[:, 0], B[:, 0], own))
            self.get_parameter(f"B_{group.key}").copy_(B[:, 0])

    def _kl(self, factors: Factors | None, source: Noise) -> KL:
        total = torch.stack([gaussian_kl(*self._moments(g), self.config.prior_sd) for g in self.groups]).sum()
        return KL({"factors": total})
