"""SWAG-LoRA: a Gaussian with the moments of the last training iterates of one LoRA (methods entry 15)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.posterior.factors import Factors
from bayeslora.posterior.noise import Noise
from bayeslora.posterior.point import PointPosterior


@dataclass(frozen=True, kw_only=True)
class SwagConfig:
    """Settings of :class:`SwagPosterior`.

    Attributes:
        start: fraction of the training after which iterates are collected.
        iterates: number of iterates collected from then on, equally spaced, the last one at the end.
        columns: number of last iterates in the low-rank part of the covariance.
    """

    start: float = 0.5
    iterates: int = 20
    columns: int = 10

    def __post_init__(self) -> None:
        if not 0 <= self.start < 1:
            raise ValueError(f"start must be at least 0 and below 1, got {self.start}")
        if not 2 <= self.columns <= self.iterates:
            raise ValueError(f"columns must be at least 2 and at most iterates, got {self.columns} of {self.iterates}")

    def due(self, step: int, steps: int) -> bool:
        """Whether the iterate after a step, counted from 1, is collected."""
        first = int(self.start * steps)
        if step <= first:
            return False
        share = min(1.0, self.iterates / (steps - first))
        return int((step - first) * share + 1e-9) > int((step - first - 1) * share + 1e-9)


class SwagPosterior(PointPosterior):
    """``θ = θ̄ + √½ (σ ⊙ z₁ + D z₂ / √(K − 1))``, with ``θ`` the factors of all layers together.

    ``θ̄`` and ``σ²`` are mean and variance of the iterates, and the ``K`` columns of ``D`` are the deviations of the last of them
    from the running mean. In training every draw is the LoRA itself, and in evaluation too until two iterates are collected.
    """

    name = "swag"
    config_class = SwagConfig
    config: SwagConfig
    spread = "width"

    def _initialise(self, generator: torch.Generator) -> None:
        super()._initialise(generator)
        for name, value in list(self.named_parameters()):
            for moment in ("average", "variance"):
                self._remember(f"{moment}_{name}", torch.zeros_like(value))
            self._remember(f"column_{name}", value.new_zeros((len(value), self.config.columns, *value.shape[1:])))
        self._remember("collected", torch.zeros((), dtype=torch.int64))

    @property
    def iterates(self) -> int:
        """Number of iterates collected."""
        return int(self.get_buffer("collected"))

    @property
    def empty(self) -> bool:
        """Whether there is no covariance yet, which takes two iterates."""
        return self.iterates < 2

    @torch.no_grad()
    def _after_step(self, step: int, steps: int) -> None:
        """Collect the iterate if it is due (Welford's method: the variance is not a difference of large numbers)."""
        if step == 1:
            self._forget()  # the iterates of an earlier run
        if not self.config.due(step, steps):
            return
        collected = self.get_buffer("collected")
        collected += 1
        count = int(collected)
        for name, value in self.named_parameters():
            average, variance = (self.get_buffer(f"{moment}_{name}") for moment in ("average", "variance"))
            before = value - average
            average += before / count
            after = value - average
            variance += (before * after - variance) / count
            self.get_buffer(f"column_{name}")[:, (count - 1) % self.config.columns] = after

    def _part(self, what: str, factor: str) -> list[Tensor]:
        return [self._tensor(f"{what}_{factor}_{group.key}") for group in self.groups]

    def _columns(self, factor: str) -> list[Tensor]:
        """The filled columns of ``D`` of every group, ``[L, K, ...]``."""
        return [column[:, : min(self.iterates, self.config.columns)] for column in self._part("column", factor)]

    def _draw(self, n: int, source: Noise) -> Factors:
        if self.training or self.iterates < 2:
            return self._points(n)
        filled = min(self.iterates, self.config.columns)
        common = source.normal((1, n, filled))[0] / (2 * (filled - 1)) ** 0.5  # common to all layers

        def draw(average: Tensor, variance: Tensor, columns: Tensor) -> Tensor:
            own = source.normal((average.shape[0], n, *average.shape[1:]))
            spread = (0.5 * variance).sqrt().unsqueeze(1) * own + torch.einsum("nk,lkij->lnij", common, columns)
            return average.unsqueeze(1) + self.scale * spread

        return Factors(self.groups, self._each("A", draw), self._each("B", draw))

    def _each(self, factor: str, make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        parts = (self._part("average", factor), self._part("variance", factor), self._columns(factor))
        return tuple(make(*part) for part in zip(*parts, strict=True))

    def _mean(self) -> Factors:
        """``E[B A] = B̄ Ā + Σ_k D_B,k D_A,k / (2 (K − 1))``: both factors follow the same columns. Rank ``R (1 + K)``."""
        if self.iterates < 2:
            return super()._mean()
        filled = min(self.iterates, self.config.columns)
        share = self.scale**2 / (2 * (filled - 1))
        A = self._each("A", lambda average, _, columns: torch.cat([average.unsqueeze(1), columns], 1).flatten(1, 2))
        B = self._each("B", lambda average, _, columns: torch.cat([average.unsqueeze(1), share * columns], 1))
        return Factors(
            self.groups, tuple(a.unsqueeze(1) for a in A), tuple(b.mT.flatten(1, 2).mT.unsqueeze(1) for b in B)
        )

    def _start_from(self, factors: Factors) -> None:
        super()._start_from(factors)
        self._forget()

    def _forget(self) -> None:
        self.get_buffer("collected").zero_()
        for name, buffer in self.named_buffers():
            if name.startswith(("average_", "variance_")):
                buffer.zero_()
