"""The objective of a step: mean cross-entropy over the options, and the KL with its weight (section 13.4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bayeslora.posterior import kl_weight
from bayeslora.posterior.kl import KLScaling


def cross_entropy(log_probabilities: Tensor, gold: Tensor, present: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every question, ``[B]``, over the options it has.

    Args:
        log_probabilities: ``[B, O]``, ``-inf`` where a question has no such option.
        gold: ``[B]``, the right options.
        present: ``[B, O]``, which options exist.
        smoothing: share of the target that is spread evenly over the options present, the right one included.
    """
    right = -log_probabilities.gather(1, gold.unsqueeze(1)).squeeze(1)
    if smoothing == 0.0:
        return right
    spread = -log_probabilities.masked_fill(~present, 0.0).sum(1) / present.sum(1)
    return (1.0 - smoothing) * right + smoothing * spread


@dataclass(frozen=True)
class KLWeight:
    """Weight of the KL beside a mean loss, at every step of a run.

    Attributes:
        scaling: ``elbo``, ``paper`` or ``blob``, see :func:`bayeslora.posterior.kl_weight`.
        beta: multiplier.
        warmup: share of the steps in which the weight rises linearly to its full value.
    """

    scaling: KLScaling = "elbo"
    beta: float = 1.0
    warmup: float = 0.0

    def at(self, step: int, steps: int, *, examples: int, batch_size: int) -> float:
        """The weight at a step, counted from 0, of so many."""
        full = kl_weight(self.scaling, examples=examples, batch_size=batch_size, beta=self.beta, step=step)
        rising = self.warmup * steps
        return full * min(1.0, (step + 1) / rising) if rising > 0 else full
