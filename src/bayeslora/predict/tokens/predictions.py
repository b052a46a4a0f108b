"""Predict every token of texts in batches; distributions over the vocabulary are not stored.

Prompts are padded on the left and targets on the right,

    [padding | prompt | target | padding]

so that the columns whose logits are needed, from the prompt's last one on, are the same for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import Sampling, sampled
from bayeslora.metrics import TokenScores
from bayeslora.predict.mc import average_in_turn, keep_possible
from bayeslora.predict.questions.options import ATTENTION
from bayeslora.predict.questions.scorer import require_numbers
from bayeslora.predict.tokens.padding import may_pad
from bayeslora.tasks.tokens import EncodedText

CELLS = 2**27
"""Probabilities per batch: half a GiB in float32, with a few such tensors at a time."""


@dataclass(frozen=True)
class TokenBatch:
    """``B`` texts in ``T`` columns, of which the last ``K`` predict targets.

    Attributes:
        input_ids: ``[B, T]``.
        attention_mask: ``[B, T]``, 0 for padding.
        targets: ``[B, K]``, the tokens that the last columns predict.
        counted: ``[B, K]``, which of them count and are not padding; on the CPU, to avoid synchronisation.
        padded: whether anything in ``input_ids`` is padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    counted: NDArray[np.bool_]
    padded: bool

    def places(self) -> tuple[Tensor, Tensor]:
        """Row and column of every target that counts, text by text."""
        found = self.counted.nonzero()
        row, column = (torch.from_numpy(index).to(self.targets.device, non_blocking=True) for index in found)
        return row, column

    def logits(self, model: nn.Module) -> Tensor:
        """Logits ``[B, K, vocabulary]`` of the tokens that predict targets."""
        mask = self.attention_mask
        with sdpa_kernel(ATTENTION):
            output: Any = model(
                input_ids=self.input_ids,
                attention_mask=mask if self.padded else None,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0) if self.padded else None,
                use_cache=False,
                logits_to_keep=self.targets.shape[1],
            )
        logits: Tensor = output.logits
        return logits


def batch_texts(texts: Sequence[EncodedText], pad_id: int, device: torch.device) -> TokenBatch:
    """Texts as one batch. The last target predicts nothing and is left out of the input."""
    given = max(len(text.prompt_ids) for text in texts)
    kept = max(len(text.target_ids) for text in texts)
    ids = np.full((len(texts), given + kept), pad_id, dtype=np.int64)
    mask = np.zeros_like(ids)
    counted = np.zeros((len(texts), kept), dtype=bool)
    for row, text in enumerate(texts):
        start, end = given - len(text.prompt_ids), given + len(text.target_ids)
        ids[row, start:end] = [*text.prompt_ids, *text.target_ids]
        mask[row, start:end] = 1
        counted[row, : len(text.target_ids)] = True if text.counted is None else text.counted
    whole, seen = (torch.from_numpy(array).to(device, non_blocking=True) for array in (ids, mask))
    padded = not mask[:, :-1].all()
    return TokenBatch(whole[:, :-1], seen[:, :-1], whole[:, given:], counted, padded)


@dataclass(frozen=True)
class Predicted:
    """Predictions of some texts.

    Attributes:
        rows: indices of the texts.
        log_probabilities: ``[tokens, vocabulary]`` of their targets, text by text, averaged over the draws.
        labels: ``[tokens]``, the targets.
    """

    rows: list[int]
    log_probabilities: Tensor
    labels: Tensor


@torch.no_grad()
def predict_tokens(
    model: nn.Module,
    texts: Sequence[EncodedText],
    sampling: Sampling,
    *,
    pad_id: int = 0,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> Iterator[Predicted]:
    """Predict all targets under the same draws of the adapter, or under its mean with 0 samples.

    Draws are made once from the seed and applied in turn to every batch: of draws × tokens × vocabulary only one draw and
    the running average are in memory, for at most ``batch_tokens`` and :data:`CELLS` (or one text). Where a model cannot be
    given padded prompts, a batch has prompts of one length.
    """
    holder = find_any_holder(model)
    device = next(model.parameters()).device
    mixed = may_pad(model, texts, lambda given: batch_texts(given, pad_id, device).logits(model)[0])
    done = 0
    with sampled(model, sampling) as draws:
        for rows in _batches(texts, batch_tokens, _vocabulary(model), mixed=mixed):
            batch = batch_texts([texts[row] for row in rows], pad_id, device)
            counted = batch.places()
            averaged = average_in_turn(holder, draws, partial(_log_probabilities, batch, model, counted))
            require_numbers(averaged)
            yield Predicted(rows, averaged, batch.targets[counted])
            done += len(rows)
            if advance is not None:
                advance(done, len(texts))


def _log_probabilities(batch: TokenBatch, model: nn.Module, counted: tuple[Tensor, Tensor]) -> Tensor:
    return batch.logits(model)[counted].float().log_softmax(-1)


def score_tokens(log_probabilities: Tensor, labels: Tensor) -> TokenScores:
    """:func:`bayeslora.metrics.token_scores` computed on the device of the distributions ``[tokens, vocabulary]``."""
    probabilities = log_probabilities.exp()
    highest, guess = log_probabilities.max(-1)
    log_right = log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1).double()
    right = log_right.exp()
    entropy = torch.special.entr(probabilities).sum(-1)
    brier = probabilities.square_().sum(-1).double() - 2.0 * right + 1.0
    return TokenScores(
        label_probability=keep_possible(right.cpu().numpy(), log_right.cpu().numpy()),
        confidence=highest.exp().cpu().numpy(),
        correct=(guess == labels).cpu().numpy(),
        entropy=entropy.double().cpu().numpy(),
        brier=brier.cpu().numpy(),
    )


def _batches(texts: Sequence[EncodedText], tokens: int, vocabulary: int, *, mixed: bool = True) -> Iterator[list[int]]:
    """Row numbers of the texts, longest first, in batches within the limits (or of one text).

    Unless they may be ``mixed``, the prompts of a batch are equally long.
    """
    prompts = [0 if mixed else len(text.prompt_ids) for text in texts]
    order = sorted(range(len(texts)), key=lambda row: (prompts[row], len(texts[row])), reverse=True)
    batch: list[int] = []
    width = kept = 0
    for row in order:
        width = max(width, len(texts[row]))
        kept = max(kept, len(texts[row].target_ids))
        size = len(batch) + 1
        full = size * width > tokens or size * kept * vocabulary > CELLS
        if batch and (full or prompts[row] != prompts[batch[0]]):
            yield batch
            batch, width, kept = [], len(texts[row]), len(texts[row].target_ids)
        batch.append(row)
    if batch:
        yield batch


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)
