"""A LoRA that remembers where its training came by: checkpoint ensembles (methods card 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.posterior.base import Factors
from bayeslora.posterior.ensemble import balanced_choice, side_by_side
from bayeslora.posterior.point import PointPosterior


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """Settings of :class:`SnapshotPosterior`.

    Attributes:
        members: how many of the last snapshots are kept.
        snapshots: how many are taken in a training run, at equal distances, the last one at its end.
    """

    members: int = 3
    snapshots: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.members <= self.snapshots:
            raise ValueError(
                f"members must be at least 1 and at most snapshots, got {self.members} of {self.snapshots}"
            )


class SnapshotPosterior(PointPosterior):
    """The uniform distribution over the last ``K`` snapshots of one LoRA in training.

    In training every draw is the LoRA itself; in evaluation draws are snapshots, each as often as any other. Before the
    first snapshot there is only the LoRA.
    """

    config_class = SnapshotConfig
    config: SnapshotConfig
    stochastic = True

    def _initialise(self, generator: torch.Generator) -> None:
        super()._initialise(generator)
        for group in self.groups:
            for factor, shape in group.factor_shapes.items():
                self._remember(f"kept_{factor}_{group.key}", torch.zeros(len(group), self.config.members, *shape))
        self._remember("taken", torch.zeros((), dtype=torch.int64))

    @property
    def held(self) -> int:
        """How many snapshots there are to draw from."""
        return min(int(self.get_buffer("taken")), self.config.members)

    def after_step(self, step: int, steps: int) -> None:
        """Take a snapshot where one is due."""
        share = self.config.snapshots / steps
        if int(step * share + 1e-9) > int((step - 1) * share + 1e-9):
            self._take()

    @torch.no_grad()
    def _take(self) -> None:
        taken = self.get_buffer("taken")
        for name, parameter in self.named_parameters():
            self.get_buffer(f"kept_{name}")[:, int(taken) % self.config.members] = parameter
        taken += 1

    def draw_count(self, samples: int) -> int:
        """Every snapshot once, whatever the budget."""
        return max(1, self.held)

    def _draw(self, n: int, generator: torch.Generator | None) -> Factors:
        if self.training or not self.held:
            return super()._draw(n, generator)
        chosen = balanced_choice(n, self.held, generator, self._reference.device)
        A, B = (tuple(stack.index_select(1, chosen) for stack in self._snapshots(factor)) for factor in ("A", "B"))
        return Factors(self.groups, A, B)

    def _mean(self) -> Factors:
        if not self.held:
            return super()._mean()
        return Factors(self.groups, *side_by_side(self._snapshots("A"), self._snapshots("B")))

    def _snapshots(self, factor: str) -> Sequence[Tensor]:
        """Snapshots of one factor per group, ``[L, held, ...]``."""
        return [self._tensor(f"kept_{factor}_{group.key}")[:, : self.held] for group in self.groups]

    def _start_from(self, factors: Factors) -> None:
        super()._start_from(factors)
        self.get_buffer("taken").zero_()
