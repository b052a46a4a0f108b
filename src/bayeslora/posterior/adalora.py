"""AdaLoRA: a point estimate in SVD form, whose rank is allocated among the layers during training (card 12)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.layers import LayerGroup
from bayeslora.posterior.noise import Noise

START_SD = 0.02
"""Initial standard deviation of the singular vectors' entries."""


@dataclass(frozen=True, kw_only=True)
class AdaloraConfig:
    """Settings of :class:`AdaloraPosterior`.

    The schedule is given in fractions of the run, whose length is not known here. The defaults are close to those of the
    published runs on RTE and MRPC, whose lengths are the closest to ours.

    Attributes:
        target_share: final fraction of the rank, averaged over the layers; PEFT's 12 to 8 by default.
        orthogonality: weight of the penalty that keeps singular vectors orthonormal.
        start: fraction of the steps before the budget starts to fall.
        end: fraction of the steps at which the budget reaches its target; from then on the kept triplets are fixed.
        every: steps between allocations.
        beta1: decay of the running mean of a parameter's sensitivity.
        beta2: decay of the running mean of its uncertainty.
    """

    target_share: float = 2 / 3
    orthogonality: float = 0.5
    start: float = 0.15
    end: float = 0.5
    every: int = 1
    beta1: float = 0.85
    beta2: float = 0.85

    def __post_init__(self) -> None:
        if not 0 < self.target_share <= 1:
            raise ValueError(f"target_share must be above 0 and at most 1, got {self.target_share}")
        if not (math.isfinite(self.orthogonality) and self.orthogonality >= 0):
            raise ValueError(f"orthogonality must be finite and not negative, got {self.orthogonality}")
        if not 0 <= self.start < self.end <= 1:
            raise ValueError(f"need 0 <= start < end <= 1, got start {self.start} and end {self.end}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")
        for name in ("beta1", "beta2"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")

    def window(self, steps: int) -> tuple[int, int]:
        """The last step with the full budget, and the step that reaches the final one."""
        finish = max(1, round(self.end * steps))
        return min(round(self.start * steps), finish - 1), finish


class AdaloraPosterior(Posterior):
    """``B diag(E) A`` with nearly orthonormal rows of ``A`` and columns of ``B``, and ``E`` zero where rank is saved.

    All ``R`` triplets of a layer (an entry of ``E`` with its row and column) are trained. While the budget falls, the least
    important ones of the whole network have their entry of ``E`` set to zero every few steps; it may grow back until the
    budget is final. Pruned vectors stay in memory: pruning saves rank in the update, not in the file.

    The factors of a draw have ``E`` in the rows of ``A``. The importance statistics are not saved with the adapter: a loaded
    adapter has its pruned triplets at zero, but may regain them when trained again.
    """

    name = "adalora"
    config_class = AdaloraConfig
    config: AdaloraConfig
    spread = "nothing"
    hints = TrainingHints({"A_": "weights_a", "B_": "weights_b", "E_": "weights_e"})

    def _initialise(self, generator: torch.Generator) -> None:
        for group in self.groups:
            values = {
                factor: START_SD * torch.randn((len(group), *shape), generator=generator)
                for factor, shape in group.factor_shapes.items()
            }
            values["E"] = torch.zeros(len(group), group.rank)
            for factor, value in values.items():
                self._add(f"{factor}_{group.key}", value)
                self._remember(f"sensitivity_{factor}_{group.key}", torch.zeros_like(value), saved=False)
                self._remember(f"uncertainty_{factor}_{group.key}", torch.zeros_like(value), saved=False)
            self._remember(f"kept_{group.key}", torch.ones_like(values["E"], dtype=torch.bool), saved=False)

    def _draw(self, n: int, source: Noise) -> Factors:
        A = [self._tensor(f"E_{g.key}").unsqueeze(-1) * self._tensor(f"A_{g.key}") for g in self.groups]
        B = [self._tensor(f"B_{g.key}") for g in self.groups]
        wide, tall = (tuple(f.unsqueeze(1).expand(-1, n, -1, -1) for f in factor) for factor in (A, B))
        return Factors(self.groups, wide, tall)

    def _mean(self) -> Factors:
        return self._draw(1, self.noise())

    def _start_from(self, factors: Factors) -> None:
        """Normalise the vectors and put their lengths in ``E``. A vector of length zero is replaced by the current one: at
        zero, it and its triplet could never be trained."""
        for group, A, B in zip(self.groups, factors.A, factors.B, strict=True):
            E = torch.ones_like(A[:, 0, :, 0])
            for name, given, along in (("A", A[:, 0], -1), ("B", B[:, 0], -2)):
                own, length = self.get_parameter(f"{name}_{group.key}"), given.norm(dim=along, keepdim=True)
                own.copy_(torch.where(length > 0, given / length, own))
                E *= length.squeeze(along)
            self.get_parameter(f"E_{group.key}").copy_(E)
            self.get_buffer(f"kept_{group.key}").fill_(True)
        self._forget()

    def penalty(self) -> Tensor | None:
        """Mean of ``‖A Aᵀ − I‖`` and ``‖Bᵀ B − I‖`` (Frobenius) over all matrices, times its weight."""
        if self.config.orthogonality == 0:
            return None
        with self._full_precision():
            distances = [_distance(rows) for group in self.groups for rows in self._vectors(group)]
            return self.config.orthogonality * torch.cat(distances).mean()

    def _vectors(self, group: LayerGroup) -> tuple[Tensor, Tensor]:
        """Singular vectors of a group as rows, right and left."""
        return self._tensor(f"A_{group.key}"), self._tensor(f"B_{group.key}").mT

    # Rank allocation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _after_step(self, step: int, steps: int) -> None:
        """Update the importance of every triplet and, when due, zero those outside the budget."""
        if any(parameter.grad is None for parameter in self.parameters()):
            return  # this adapter is not being trained
        begin, finish = self.config.window(steps)
        due = step == finish or (begin < step < finish and step % self.config.every == 0)
        if step < finish:
            self._measure()
        if due:
            self._allocate(self.budget(step, steps))
        if due or step > finish:
            for group in self.groups:
                E = self.get_parameter(f"E_{group.key}")
                E.masked_fill_(~self.get_buffer(f"kept_{group.key}").to(E.device), 0.0)
        if step == finish:
            self._forget()  # a later run starts with fresh statistics

    def budget(self, step: int, steps: int) -> int:
        """Number of triplets kept in all layers together after a step; it falls as a cubic from all of them."""
        full = sum(len(group) * group.rank for group in self.groups)
        target = sum(len(group) * max(1, round(self.config.target_share * group.rank)) for group in self.groups)
        begin, finish = self.config.window(steps)
        remaining = 1.0 - (min(max(step, begin), finish) - begin) / (finish - begin)
        return int((full - target) * remaining**3 + target)

    def _measure(self) -> None:
        """Update the running means of every parameter's sensitivity ``|θ ∂L/∂θ|`` and of its deviation from that mean."""
        for name, parameter in self.named_parameters():
            smooth, uncertain = (self.get_buffer(f"{what}_{name}") for what in ("sensitivity", "uncertainty"))
            assert parameter.grad is not None
            sensitivity = (parameter * parameter.grad).abs().to(smooth)
            smooth.lerp_(sensitivity, 1.0 - self.config.beta1)
            uncertain.lerp_((sensitivity - smooth).abs(), 1.0 - self.config.beta2)

    def _allocate(self, budget: int) -> None:
        """Keep the most important triplets of all layers together. Nothing here waits for the device."""
        scores = [self.importance(group).flatten() for group in self.groups]
        best = torch.cat(scores).topk(budget).indices
        kept = torch.zeros(sum(map(len, scores)), dtype=torch.bool, device=best.device).index_fill_(0, best, True)
        for group, mask in zip(self.groups, kept.split([len(score) for score in scores]), strict=True):
            self.get_buffer(f"kept_{group.key}").copy_(mask.view(len(group), group.rank))

    def importance(self, group: LayerGroup) -> Tensor:
        """Importance of every triplet, ``[L, R]``: that of its singular value plus the means of those of its vectors."""

        def score(factor: str) -> Tensor:
            smooth, uncertain = (
                self._tensor(f"{what}_{factor}_{group.key}") for what in ("sensitivity", "uncertainty")
            )
            return smooth * uncertain

        return score("E") + score("A").mean(-1) + score("B").mean(-2)

    def _forget(self) -> None:
        for name, buffer in self.named_buffers():
            if name.startswith(("sensitivity_", "uncertainty_")):
                buffer.zero_()


def _distance(rows: Tensor) -> Tensor:
    """Distance of rows ``[L, R, width]`` from orthonormal ones, ``[L]``."""
    gram = rows @ rows.mT
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).flatten(1).norm(dim=1)
