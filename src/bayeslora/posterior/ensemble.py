"""K points: deep ensembles and checkpoint ensembles as a posterior (methods cards 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bayeslora.posterior.base import Factors, Posterior
from bayeslora.posterior.layers import LayerShape
from bayeslora.posterior.point import PointPosterior


class EnsemblePosterior(Posterior):
    """The uniform distribution over ``K`` members, each a LoRA of its own.

    A draw picks members, the same one in every layer. Draws are balanced: ``K`` draws are every member
    once in random order, so that averaging over ``K`` draws is exactly the ensemble's prediction.

    The posterior scale has no effect: a set of points has no width to multiply.
    """

    def __init__(self, layers: Sequence[LayerShape], members: int = 3, seed: int = 0) -> None:
        super().__init__(layers)
        if members < 1:
            raise ValueError(f"an ensemble needs at least 1 member, got {members}")
        self.members = members
        points = [PointPosterior(layers, seed=seed + k) for k in range(members)]
        for name, _ in points[0].named_parameters():
            stacked = torch.stack([p.get_parameter(name).detach() for p in points], dim=1)
            self.register_parameter(name, nn.Parameter(stacked))

    @torch.no_grad()
    def set_member(self, index: int, point: PointPosterior) -> None:
        """Copy a trained LoRA into place ``index``."""
        if point.layers != self.layers:
            raise ValueError("a member must cover the same layers, in the same order, as the ensemble")
        for name, value in point.named_parameters():
            self.get_parameter(name)[:, index] = value

    def _stack(self, factor: str) -> list[Tensor]:
        """Members of one factor per group, ``[L, K, ...]``."""
        return [self._tensor(f"{factor}_{group.key}") for group in self.groups]

    def _draw(self, n: int, generator: torch.Generator | None) -> Factors:
        source = generator.device if generator is not None else self._reference.device
        rounds = [
            torch.randperm(self.members, generator=generator, device=source) for _ in range(-(-n // self.members))
        ]
        chosen = torch.cat(rounds)[:n].to(self._reference.device)
        stacks = (tuple(t.index_select(1, chosen) for t in self._stack(f)) for f in ("A", "B"))
        return Factors(self.groups, *stacks)

    def _mean(self) -> Factors:
        """``1/K Σ_k B_k A_k`` as one pair of factors of rank ``K R``: members side by side."""
        wide = tuple(a.flatten(1, 2).unsqueeze(1) for a in self._stack("A"))
        tall = tuple(b.mT.flatten(1, 2).mT.unsqueeze(1) / self.members for b in self._stack("B"))
        return Factors(self.groups, wide, tall)
