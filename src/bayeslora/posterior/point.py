"""Plain LoRA as a posterior: all mass on one pair of factors per layer (methods entry 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bayeslora.posterior.base import Posterior, Spread
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.layers import lora_start, trainable_rows
from bayeslora.posterior.noise import Noise


@dataclass(frozen=True)
class PointConfig:
    """A point estimate has no settings."""


class PointPosterior(Posterior):
    """LoRA's point estimate. All draws are equal; scale and KL have no effect.

    ``A`` starts Kaiming-uniform with ``a = √5`` (entries within ``± 1/√i``) and ``B`` at zero, as in LoRA.
    """

    name = "point"
    config_class: ClassVar[type] = PointConfig
    spread: ClassVar[Spread] = "nothing"
    hints = TrainingHints({"A_": "weights_a", "B_": "weights_b"})

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            for factor, value in lora_start(group, generator).items():
                self._add(f"{factor}_{group.key}", value)

    def _draw(self, n: int, source: Noise) -> Factors:
        return self._points(n)

    def _points(self, n: int = 1) -> Factors:
        """The point, repeated ``n`` times."""
        A, B = (
            tuple(self._tensor(f"{factor}_{group.key}").unsqueeze(1).expand(-1, n, -1, -1) for group in self.groups)
            for factor in ("A", "B")
        )
        return Factors(self.groups, A, B)

    def _mean(self) -> Factors:
        return self._points()

    def _start_from(self, factors: Factors) -> None:
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            own = self.get_parameter(f"A_{group.key}")
            own.copy_(trainable_rows(A[:, 0], B[:, 0], own))
            self.get_parameter(f"B_{group.key}").copy_(B[:, 0])
