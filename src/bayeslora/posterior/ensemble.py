"""K points: deep ensembles as a posterior (methods entry 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.layers import lora_start, trainable_rows
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.snapshots import balanced_choice, side_by_side

MOST_MEMBERS = 256
"""More would only come from a damaged or hostile configuration, and take for ever to build."""


@dataclass(frozen=True)
class EnsembleConfig:
    """Number of members of an ensemble."""

    members: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.members <= MOST_MEMBERS:
            raise ValueError(f"an ensemble needs at least 1 member and at most {MOST_MEMBERS}, got {self.members}")


class EnsemblePosterior(Posterior):
    """The uniform distribution over ``K`` members, each a LoRA of its own.

    A draw picks members, the same one in every layer. Draws are balanced: ``K`` draws are every member
    once in random order, so that averaging over ``K`` draws is exactly the ensemble's prediction.
    """

    name = "ensemble"
    config_class = EnsembleConfig
    spread = "members"
    hints = TrainingHints({"A_": "weights_a", "B_": "weights_b"})

    @property
    def members(self) -> int:
        """Number of members."""
        return int(self.config.members)

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            starts = [lora_start(group, generator) for _ in range(self.members)]
            for factor in ("A", "B"):
                self._add(f"{factor}_{group.key}", torch.stack([start[factor] for start in starts], dim=1))

    @torch.no_grad()
    def set_member(self, index: int, factors: Factors) -> None:
        """Copy a trained LoRA (one draw) to the member ``index``."""
        if factors.groups != self.groups:
            raise ValueError("a member must cover the same layers, in the same order, as the ensemble")
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            self.get_parameter(f"A_{group.key}")[:, index] = A[:, 0]
            self.get_parameter(f"B_{group.key}")[:, index] = B[:, 0]

    def _stack(self, factor: str) -> list[Tensor]:
        """Members of one factor per group, ``[L, K, ...]``."""
        return [self._tensor(f"{factor}_{group.key}") for group in self.groups]

    def draw_count(self, samples: int) -> int:
        """Number of members, whatever the budget: the ensemble's prediction uses each of them once."""
        return self.members

    def _draw(self, n: int, source: Noise) -> Factors:
        chosen = torch.tensor(balanced_choice(n, self.members, source), device=self._reference.device)
        A, B = (tuple(t.index_select(1, chosen) for t in self._stack(f)) for f in ("A", "B"))
        return Factors(self.groups, A, B)

    def _mean(self) -> Factors:
        return Factors(self.groups, *side_by_side(self._stack("A"), self._stack("B")))

    def _start_from(self, factors: Factors) -> None:
        """Start every member from the same factors; training makes them differ."""
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            own = self.get_parameter(f"A_{group.key}")
            own.copy_(trainable_rows(A, B, own))
            self.get_parameter(f"B_{group.key}").copy_(B.expand(-1, self.members, -1, -1))
