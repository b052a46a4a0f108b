"""Natural-gradient steps of a diagonal Gaussian: the improved variational online Newton method (methods entry 14)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.posterior.ivon import IvonConfig
from bayeslora.train.steps import Steps


class Ivon(torch.optim.Optimizer):
    """Updates means ``m`` and widths ``σ`` of Gaussians along the natural gradient of the bound.

    With draws ``θ = m + σ ε`` backpropagation gives the mean gradients ``ĝ = ∂L/∂m`` and ``∂L/∂σ = E[ε g]``, and so

        ĥ = (∂L/∂σ) / σ,     g ← β₁ g + (1 − β₁) ĝ,     h ← β₂ h + (1 − β₂) ĥ + ½ (1 − β₂)² (h − ĥ)² / (h + δ),
        m ← m − α clip((g / (1 − β₁ᵗ) + δ m) / (h + δ)),     σ = 1 / √(λ (h + δ)).

    ``h`` is stored only through ``σ``. The last term of its step keeps ``h + δ`` above zero.

    Args:
        pairs: means with their widths.
        lr: learning rate ``α``.
        config: other settings.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]], lr: float, config: IvonConfig) -> None:
        self._pairs = list(pairs)
        self._config = config
        super().__init__([{"params": [mean for mean, _ in self._pairs], "kind": "mean"}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step along the current gradients; nothing is updated if they are not finite."""
        rate = self.param_groups[0]["lr"]
        finite = torch.isfinite(self.norm())
        for mean, sd in self._pairs:
            if mean.grad is not None and sd.grad is not None:
                self._move(mean, sd, mean.grad, sd.grad / sd, rate, finite)

    def norm(self) -> Tensor:
        """Norm of the gradients of all means and widths together."""
        gradients = [p.grad for pair in self._pairs for p in pair if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients)

    def _move(
        self, mean: nn.Parameter, sd: nn.Parameter, gradient: Tensor, estimate: Tensor, rate: float, finite: Tensor
    ) -> None:
        """Update one pair from ``ĝ`` and ``ĥ``, if all gradients are finite."""
        c, state = self._config, self.state[mean]
        if not state:
            state["momentum"], state["step"] = torch.zeros_like(mean), mean.new_zeros(())
        damped = 1.0 / (c.sample_size * sd.square())
        h = damped - c.damping
        momentum = torch.lerp(gradient, state["momentum"], c.beta1)
        gap = h - estimate
        h = h - (1 - c.beta2) * gap + 0.5 * (1 - c.beta2) ** 2 * gap.square() / damped
        step = state["step"] + 1
        along = (momentum / (1 - c.beta1**step) + c.damping * mean) / (h + c.damping)
        moved = mean - rate * along.clamp(-c.radius, c.radius)
        for old, new in (
            (mean, moved),
            (sd, (c.sample_size * (h + c.damping)).rsqrt()),
            (state["momentum"], momentum),
            (state["step"], step),
        ):
            old.copy_(torch.where(finite, new, old))


class IvonSteps(Steps):
    """IVON on the loss; the prior is part of its steps, so the KL is not used.

    Args:
        groups: of parameters, from :func:`bayeslora.train.optimise.parameter_groups`: means and their widths.
        config: of the posterior.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], config: IvonConfig) -> None:
        named = {
            name.rpartition(".")[2]: p
            for group in groups
            for name, p in zip(group["names"], group["params"], strict=True)
        }
        pairs = [
            (p, named["sd_" + name.removeprefix("mean_")]) for name, p in named.items() if name.startswith("mean_")
        ]
        rate = next(group["lr"] for group in groups if group["kind"] == "mean")
        self.optimiser = self._ivon = Ivon(pairs, rate, config)
        self.groups = self.optimiser.param_groups
        self._widths = [sd for _, sd in pairs]

    def zero_grad(self) -> None:
        """Clear the gradients of means and widths."""
        super().zero_grad()
        for sd in self._widths:
            sd.grad = None

    def gradients(self) -> list[Tensor]:
        """All gradients of this step so far, those of the widths included."""
        return [*super().gradients(), *(sd.grad for sd in self._widths if sd.grad is not None)]

    def backward(self, loss: Tensor, kl: Tensor) -> None:
        """Backpropagate the loss only."""
        loss.backward()

    def step(self) -> Tensor:
        """Take an IVON step; returns the norm of the gradient."""
        norm = self._ivon.norm()
        self._ivon.step()
        return norm
