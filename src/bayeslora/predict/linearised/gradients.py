"""What passes with gradients have in common: the model evaluated as it is, smaller batches, one backward pass per option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from bayeslora.adapter.holder import PosteriorHolder, find_holder
from bayeslora.adapter.sampling import evaluating
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.predict.options import Encoded, packed_length
from bayeslora.predict.scorer import Scorer, batches_by_length, within_memory

T = TypeVar("T")

GRAPH_COST = 8
"""A token that is kept for backward passes takes several times the memory of one that is only scored."""

TOP_COST = 2
"""The same where gradients reach no further down than the last layer."""


@contextmanager
def differentiating(scorer: Scorer) -> Iterator[PosteriorHolder]:
    """Inside the block the model is in evaluation mode and gradients are recorded; after it all is as before."""
    holder = find_holder(scorer.model)
    with evaluating(scorer.model), holder.restoring(), torch.enable_grad():
        yield holder


def with_graphs(
    action: Callable[[int], T], items: Sequence[Encoded], batch_tokens: int, posterior: LaplacePosterior
) -> T:
    """What the action gives with as many tokens at once as leave room for graphs, or fewer if the GPU's memory runs out."""
    cost = TOP_COST if posterior.config.scope == "last" else GRAPH_COST
    return within_memory(action, batch_tokens // cost, least=max(map(packed_length, items)))


def graph_batches(items: Sequence[Encoded], tokens: int, most: int | None = None) -> Iterator[list[int]]:
    """Row numbers of the items in batches of that many tokens and at most so many items."""
    for rows in batches_by_length(items, tokens):
        step = len(rows) if most is None else max(1, most)
        yield from (rows[start : start + step] for start in range(0, len(rows), step))


def option_gradients(values: Tensor, present: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """For every option, the gradient of its values ``[N, O]`` summed over the questions that have it."""
    kept = values.masked_fill(~present, 0.0)
    last = kept.shape[1] - 1
    for option in range(last + 1):
        yield torch.autograd.grad(kept[:, option].sum(), inputs, retain_graph=option < last, materialize_grads=True)
