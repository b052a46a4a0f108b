"""Components of a mixture that have learnt nothing: how they are recognised, and replaced by one that has.

Each component of a posterior with several means learns from its own part of every batch. At a high learning rate one of them
may be lost early, as a single LoRA may, and then gives all answers the same probability for the rest of the training. Every
prediction would be an average with that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

FAILED = 2.0
"""A component has failed if its training loss over an epoch is this many times the median of the others, and ..."""

UNTRAINED = 0.8
"""... this share of the loss without training, or of a guess: one that has learnt well is not replaced by one that is better."""

FEWEST = 32
"""Examples of a component in an epoch, below which its loss says too little."""


@dataclass
class ComponentLosses:
    """Losses of the current epoch by component.

    Attributes:
        total: sum of the losses of each component's examples.
        terms: answers or tokens in these examples.
        examples: their number.
    """

    total: list[float] = field(default_factory=list)
    terms: list[float] = field(default_factory=list)
    examples: list[float] = field(default_factory=list)

    def add(self, figures: Sequence[float]) -> None:
        """Add those of a step, from :func:`component_figures`."""
        size = len(figures) // 3
        for kept, start in ((self.total, 0), (self.terms, size), (self.examples, 2 * size)):
            kept[:] = [a + b for a, b in zip(kept or [0.0] * size, figures[start : start + size], strict=True)]

    def means(self) -> list[float]:
        """Loss per term of each component; empty if one of them has seen too few examples."""
        if not self.examples or min(self.examples) < FEWEST:
            return []
        return [total / terms for total, terms in zip(self.total, self.terms, strict=True)]


def component_figures(
    losses: Tensor, terms: Sequence[int], counts: Sequence[float], draws: int, components: int
) -> Tensor:
    """Sums of losses, terms and examples by component, ``[3 K]``; zeros if draws are not divided evenly among components.

    Args:
        losses: ``[B]``, of the examples of a part of a batch; number ``k`` was computed with draw ``k`` modulo the draws.
        terms: answers or tokens of each example.
        counts: how often each example counts, 0 or 1.
        draws: their number; each component has equally many, next to each other.
        components: number of components ``K``.
    """
    found = losses.new_zeros(3, components, dtype=torch.float32)
    if draws % components:
        return found.flatten()
    own = torch.tensor([k % draws * components // draws for k in range(len(losses))])
    sizes = torch.tensor([[a * b for a, b in zip(terms, counts, strict=True)], counts], dtype=torch.float32)
    own, sizes = (it.to(losses.device, non_blocking=True) for it in (own, sizes))
    return found.index_add(1, own, torch.cat([losses.detach().float().unsqueeze(0), sizes])).flatten()


def failed_components(means: Sequence[float], untrained: float) -> list[int]:
    """Components whose loss shows that they have learnt nothing, never all of them.

    Args:
        means: training loss of every component.
        untrained: loss before training, or of a uniform guess if that is lower.
    """
    others = [[*means[:k], *means[k + 1 :]] for k in range(len(means))]
    return [
        k for k, loss in enumerate(means) if others[k] and loss > max(FAILED * median(others[k]), UNTRAINED * untrained)
    ]


@dataclass(frozen=True)
class Replaced:
    """A component that had learnt nothing, and goes on as a copy of another.

    Attributes:
        component: its number.
        source: the one that it is a copy of.
        means: training loss of every component before that.
    """

    component: int
    source: int
    means: Sequence[float]

    def __str__(self) -> str:
        return (
            f"component {self.component + 1} of {len(self.means)} has learnt nothing (train nll "
            f"{self.means[self.component]:.4f}, the best {self.means[self.source]:.4f}) and goes on as a copy of the best"
        )


def replace_failed(
    parameters: Sequence[Tensor], optimiser: torch.optim.Optimizer, means: Sequence[float], untrained: float
) -> Iterator[Replaced]:
    """Let components that have failed by their losses (see :func:`failed_components`) go on as copies of the best."""
    for failed in failed_components(means, untrained):
        best = min(range(len(means)), key=means.__getitem__)
        copy_component(parameters, optimiser, best, failed)
        yield Replaced(failed, best, means)


@torch.no_grad()
def copy_component(parameters: Sequence[Tensor], optimiser: torch.optim.Optimizer, source: int, target: int) -> None:
    """Replace a component's parameters ``[L, K, ...]``, and what the optimiser knows of them, by another's."""
    for parameter in parameters:
        known = optimiser.state.get(parameter, {}).values()
        for tensor in (parameter, *(it for it in known if isinstance(it, Tensor) and it.shape == parameter.shape)):
            own = _local(tensor)
            own[:, target] = own[:, source]


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has: layers are divided among processes, and components are not."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
