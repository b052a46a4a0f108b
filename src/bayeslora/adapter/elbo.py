"""The evidence lower bound of a step: likelihood, KL with its weight, and penalty (methods entry 13, section 13.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayeslora.adapter.base import Holder
from bayeslora.posterior import KL

IGNORED = -100
"""transformers' label for tokens that do not count."""


@dataclass(frozen=True)
class Elbo:
    """The negative bound per term of the data, in the parts that optimisers and logs need separately.

    Attributes:
        loss: negative log-likelihood plus the posterior's penalty.
        kl: the terms of the KL.
        share: factor of these terms, so that over all parts of a step they count once.
        weight: of the KL beside the loss.
    """

    loss: Tensor
    kl: KL
    share: float
    weight: Tensor | float

    @property
    def weighted_kl(self) -> Tensor:
        """The KL as it enters the objective."""
        return self.weight * self.share * self.kl.total

    @property
    def total(self) -> Tensor:
        """The objective to minimise."""
        return self.loss + self.weighted_kl

    @property
    def weighted_learnt_kl(self) -> Tensor:
        """The same without what no parameter changes, see :attr:`KL.learnt`."""
        return self.weight * self.share * self.kl.learnt

    @property
    def learnt(self) -> Tensor:
        """The objective less a constant."""
        return self.loss + self.weighted_learnt_kl


def elbo(holder: Holder, loss: Tensor, weight: Tensor | float, *, parts: int = 1, draws: int = 1) -> Elbo:
    """The bound at the draw that the loss was computed with.

    Args:
        holder: of the posteriors.
        loss: mean loss of the batch, or of one of its parts, divided by their number.
        weight: of the KL beside a mean over the whole batch: one over the number of terms, answers or tokens, of all
            training data.
        parts: into which a step is divided, over micro-batches and processes. The KL and the penalty count once in all of them.
        draws: of the weights, among which the batch is divided.
    """
    penalty = holder.penalty()
    whole = loss if penalty is None else loss + penalty / parts
    return Elbo(whole, holder.kl(), holder.kl_share(parts, draws), weight)


def labels_per_example(labels: Tensor | float) -> Tensor | float:
    """Number of labels per example over which transformers' loss is a mean.

    Args:
        labels: ``[B, T]`` token labels as the model gets them: the first predicts nothing and -100 does not count; ``[B]`` labels
            of whole examples; ``[B, C]`` numbers, such as several classes at once, which all count; or the number itself.
    """
    if not isinstance(labels, Tensor):
        return labels
    if labels.is_floating_point():
        return labels.numel() / len(labels)
    counted = (labels[..., 1:] if labels.ndim > 1 else labels) != IGNORED
    return counted.sum().clamp(min=1) / torch.tensor(len(labels), device=labels.device)
