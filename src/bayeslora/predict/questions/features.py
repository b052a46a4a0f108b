"""Features of questions: what the model has made of a prompt when it is about to answer.

The feature is the last hidden state at the last token of the prompt, which the output head turns into the distribution of
the next token. It is computed with the base model, without the options that follow the prompt: training for one kind of
question makes others look alike, and what they had in common with it before tells them apart better
(``benchmarks/reports/shift-qwen.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayeslora.adapter.sampling import evaluating
from bayeslora.predict.questions.options import Encoded, PackedBatch, packed_length, packed_logits
from bayeslora.predict.questions.scorer import Scorer, batches_by_length, within_memory
from bayeslora.progress import Advance


@dataclass(frozen=True)
class _Asked:
    """The prompt of a question, with one token behind it, which the last token of the prompt predicts."""

    prompt_ids: Sequence[int]
    option_ids: Sequence[Sequence[int]] = ((0,),)


def has_features(model: nn.Module) -> bool:
    """Whether the model has an output head, whose input the features are."""
    return _find_head(model) is not None


@torch.no_grad()
def prompt_features(
    model: nn.Module,
    items: Sequence[Encoded],
    *,
    pad_id: int = 0,
    batch_tokens: int = 16384,
    advance: Advance | None = None,
) -> NDArray[np.float64]:
    """Features ``[N, d]`` of questions, in their order."""
    asked = [_Asked(item.prompt_ids) for item in items]
    scorer = Scorer(model, pad_id)  # not one with a kept trunk: its key is the prompt with the options
    with evaluating(model), _without_adapters(model):
        return within_memory(
            lambda tokens: _features_at_most(scorer, asked, tokens, advance),
            batch_tokens,
            least=max(map(packed_length, asked)),
        )


def _without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """Use the base model inside the block."""
    disable = getattr(model, "disable_adapter", None)
    return nullcontext() if disable is None else disable()


def _features_at_most(
    scorer: Scorer, asked: Sequence[_Asked], batch_tokens: int, advance: Advance | None
) -> NDArray[np.float64]:
    found: list[NDArray[np.float64] | None] = [None] * len(asked)
    done = 0
    for rows in batches_by_length(asked, batch_tokens):
        states = _last_states(scorer.model, scorer.pack([asked[row] for row in rows]))
        for row, state in zip(rows, states.double().cpu().numpy(), strict=True):
            found[row] = state
        done += len(rows)
        if advance is not None:
            advance(done, len(asked))
    return np.stack([state for state in found if state is not None])


def _last_states(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Inputs ``[N, d]`` of the output head at the last token of every prompt of a batch."""
    seen: list[Tensor] = []

    def keep(head: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])

    head = _find_head(model)
    assert head is not None
    handle = head.register_forward_pre_hook(keep)  # sees the columns that are kept, one for each question
    try:
        packed_logits(model, batch)
    finally:
        handle.remove()
    states = seen[0].reshape(-1, seen[0].shape[-1])
    ordered = torch.empty_like(states[batch.source])
    ordered[batch.option] = states[batch.source]
    return ordered


def _find_head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    found = None if find is None else find()
    return found if isinstance(found, nn.Module) else None
