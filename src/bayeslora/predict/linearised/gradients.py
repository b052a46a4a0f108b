"""Helpers for passes with gradients: evaluation mode, smaller batches, one backward pass per option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from bayeslora.adapter.holder import PosteriorHolder, find_holder
from bayeslora.adapter.sampling import evaluating
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.predict.questions.options import Encoded, packed_length
from bayeslora.predict.questions.scorer import Scorer, batches_by_length, within_memory

T = TypeVar("T")

GRAPH_COST = 8
"""Memory of a token with gradients relative to one that is only scored."""

TOP_COST = 2
"""Relative memory of a token if gradients only reach the last layer."""


@contextmanager
def differentiating(scorer: Scorer) -> Iterator[PosteriorHolder]:
    """Inside the block the model is in evaluation mode with gradients enabled; the state is restored afterwards."""
    holder = find_holder(scorer.model)
    with evaluating(scorer.model), holder.restoring(), torch.enable_grad():
        yield holder


def with_graphs(
    action: Callable[[int], T], items: Sequence[Encoded], batch_tokens: int, posterior: LaplacePosterior
) -> T:
    """Run the action with a number of tokens per batch that leaves room for graphs, or fewer if GPU memory runs out."""
    cost = TOP_COST if posterior.config.scope == "last" else GRAPH_COST
    return within_memory(action, batch_tokens // cost, least=max(map(packed_length, items)))


def graph_batches(items: Sequence[Encoded], tokens: int, most: int | None = None) -> Iterator[list[int]]:
    """Row numbers of the items in batches of at most ``tokens`` tokens and ``most`` items."""
    for rows in batches_by_length(items, tokens):
        step = len(rows) if most is None else max(1, most)
        yield from (rows[start : start + step] for start in range(0, len(rows), step))


def option_gradients(values: Tensor, present: Tensor, inputs: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """For every option, the gradient of its values ``[N, O]`` summed over the questions that have it."""
    kept = values.masked_fill(~present, 0.0)
    last = kept.shape[1] - 1
    for option in range(last + 1):
        yield torch.autograd.grad(kept[:, option].sum(), inputs, retain_graph=option < last, materialize_grads=True)
