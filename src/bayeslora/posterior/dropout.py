"""MC-dropout: a LoRA whose inputs are dropped at random, in prediction too (methods card 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeslora.posterior.base import Factors
from bayeslora.posterior.inner import InputDropout
from bayeslora.posterior.point import PointPosterior


@dataclass(frozen=True, kw_only=True)
class DropoutConfig:
    """Settings of :class:`DropoutPosterior`.

    Attributes:
        p: probability that an input feature is dropped.
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ValueError(
                f"p must lie between 0 and 1, got {self.p}; without dropout nothing is random, use 'point'"
            )


class DropoutPosterior(PointPosterior):
    """LoRA with dropout on the adapter's input.

    In training every position has a mask of its own, as in LoRA. In evaluation a draw is one mask for all rows and
    positions, which is the same as columns of ``A`` that are dropped: so a draw is a network, and can be exported.
    """

    config_class = DropoutConfig
    partial = True
    stochastic = True

    def _draw(self, n: int, generator: torch.Generator | None) -> Factors:
        factors = super()._draw(n, generator)
        p = self.config.p
        if self.training:
            return replace(factors, inners=tuple(InputDropout(p=p) for _ in self.groups))
        return replace(factors, A=tuple(a * self._mask(a, generator) / (1.0 - p) for a in factors.A))

    def _mean(self) -> Factors:
        return super()._draw(1, None)

    def _mask(self, a: Tensor, generator: torch.Generator | None) -> Tensor:
        """One for every input feature that is kept, ``[L, n, 1, i]``."""
        source = generator.device if generator is not None else a.device
        uniform = torch.rand((*a.shape[:2], 1, a.shape[3]), generator=generator, device=source)
        return (uniform >= self.config.p).to(a)
