"""Plain LoRA as a posterior: all mass on one pair of factors per layer (methods card 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bayeslora.posterior.base import Factors, Posterior
from bayeslora.posterior.layers import LayerShape


class PointPosterior(Posterior):
    """LoRA's point estimate. Every draw is the same; scale and KL have nothing to act on.

    ``A`` starts Kaiming-uniform with ``a = √5`` (entries within ``± 1/√i``) and ``B`` at zero, as in LoRA.
    """

    def __init__(self, layers: Sequence[LayerShape], seed: int = 0) -> None:
        super().__init__(layers)
        generator = torch.Generator().manual_seed(seed)
        for group in self.groups:
            shape_a, shape_b = ((len(group), *s) for s in group.factor_shapes.values())
            uniform = 2.0 * torch.rand(shape_a, generator=generator) - 1.0
            self.register_parameter(f"A_{group.key}", nn.Parameter(uniform / group.in_features**0.5))
            self.register_parameter(f"B_{group.key}", nn.Parameter(torch.zeros(shape_b)))

    def _draw(self, n: int, generator: torch.Generator | None) -> Factors:
        stacks = (
            tuple(self._tensor(f"{factor}_{group.key}").unsqueeze(1).expand(-1, n, -1, -1) for group in self.groups)
            for factor in ("A", "B")
        )
        return Factors(self.groups, *stacks)

    def _mean(self) -> Factors:
        return self._draw(1, None)
