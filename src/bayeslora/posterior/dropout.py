"""MC-dropout: a LoRA with random dropout on its inputs, in prediction too (methods entry 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from bayeslora.posterior.factors import Factors
from bayeslora.posterior.inner import InputDropout
from bayeslora.posterior.noise import Noise
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

    In training every position has its own mask, as in LoRA. In evaluation a draw is one mask for all rows and positions,
    which is equivalent to dropping columns of ``A``: so a draw is a network, and can be exported.
    """

    name = "dropout"
    config_class = DropoutConfig
    partial = True
    spread = "members"

    def _draw(self, n: int, source: Noise) -> Factors:
        factors = self._points(n)
        p = self.config.p
        if self.training:
            return replace(factors, inners=tuple(InputDropout(p=p) for _ in self.groups))
        return replace(factors, A=tuple(a * self._mask(a, source) / (1.0 - p) for a in factors.A))

    def _mask(self, a: Tensor, source: Noise) -> Tensor:
        """Mask ``[L, n, 1, i]`` with one for every kept input feature."""
        return (source.uniform((*a.shape[:2], 1, a.shape[3])) >= self.config.p).to(a)
