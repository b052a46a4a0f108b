"""What passes with gradients have in common: the model evaluated as it is, smaller batches, one backward pass per option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from bayeslora.adapter.holder import PosteriorHolder, find_holder
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.predict.options import Encoded
from bayeslora.predict.scorer import Scorer, batches_by_length

GRAPH_COST = 8
"""A token that is kept for backward passes takes several times the memory of one that is only scored."""

TOP_COST = 2
"""The same where gradients reach no further down than the last layer."""


@contextmanager
def differentiating(scorer: Scorer) -> Iterator[PosteriorHolder]:
    """Inside the block the model is in evaluation mode and gradients are recorded; after it all is as before."""
    holder, training = find_holder(scorer.model), scorer.model.training
    scorer.model.eval()
    try:
        with holder.restoring(), torch.enable_grad():
            yield holder
    finally:
        scorer.model.train(training)


def graph_batches(
    items: Sequence[Encoded], batch_tokens: int, posterior: LaplacePosterior, most: int | None = None
) -> Iterator[list[int]]:
    """Row numbers of the items in batches that a backward pass has room for, of at most so many items."""
    cost = TOP_COST if posterior.config.scope == "last" else GRAPH_COST
    for rows in batches_by_length(items, batch_tokens // cost):
        step = len(rows) if most is None else max(1, most)
        yield from (rows[start : start + step] for start in range(0, len(rows), step))


def option_gradients(values: Tensor, present: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """For every option, the gradient of its values ``[N, O]`` summed over the questions that have it."""
    kept = values.masked_fill(~present, 0.0)
    last = kept.shape[1] - 1
    for option in range(last + 1):
        yield torch.autograd.grad(kept[:, option].sum(), inputs, retain_graph=option < last, materialize_grads=True)
