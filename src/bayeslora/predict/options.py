"""Scoring the options of a question with the prompt computed once for all of them.

The options of an item are packed behind its prompt into one sequence,

    [padding | prompt | option 1 | option 2 | ... | padding]

in which an option sees the prompt and itself, but no other option, and its positions start where the prompt ends. The
prompts of a batch end in the same column, so only the columns from there on need logits. The result equals that of one
sequence per option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslora.errors import InputError


class Encoded(Protocol):
    """A question as token ids."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""

    @property
    def option_ids(self) -> Sequence[Sequence[int]]:
        """Tokens of what follows the prompt, for every option."""


@dataclass(frozen=True)
class PackedBatch:
    """``B`` items in ``T`` columns, of which the last ``K`` hold options; ``O`` is the largest number of options.

    Attributes:
        input_ids: ``[B, T]``.
        position_ids: ``[B, T]``, starting anew with every option.
        visible: ``[B, T, T]``, which columns (last) a column sees.
        source: ``[B, K]``, for every option token the kept column whose logits predict it (column 0 is the prompt's last).
        option: ``[B, K]``, which option the token belongs to; ``O`` for padding.
        lengths: ``[B, O]``, tokens per option; 0 where an item has no such option.
    """

    input_ids: Tensor
    position_ids: Tensor
    visible: Tensor
    source: Tensor
    option: Tensor
    lengths: Tensor

    @property
    def kept(self) -> int:
        """Columns whose logits are needed: the prompt's last and all option tokens."""
        return self.source.shape[1] + 1

    @property
    def present(self) -> Tensor:
        """``[B, O]``, which options exist."""
        return self.lengths > 0

    @property
    def used(self) -> Tensor:
        """``[B, T]``, tokens that a score depends on: neither padding nor the last one of an option."""
        prompt_width = self.input_ids.shape[1] - self.source.shape[1]
        prompt = self.visible[:, prompt_width - 1, :prompt_width]
        columns = torch.arange(self.source.shape[1], device=self.source.device)
        followed = (self.source == columns)[:, 1:]  # by a token that it predicts
        return F.pad(torch.cat([prompt, followed], dim=1), (0, 1))

    def repeat(self, n: int) -> PackedBatch:
        """The batch ``n`` times in blocks, one for each draw."""
        return PackedBatch(
            *(getattr(self, f.name).repeat(n, *[1] * (getattr(self, f.name).ndim - 1)) for f in fields(self))
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device."""
        return PackedBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


def pack(items: Sequence[Encoded], pad_id: int = 0) -> PackedBatch:
    """Pack encoded items into one batch."""
    prompt_width = max(len(item.prompt_ids) for item in items)
    option_width = max(sum(map(len, item.option_ids)) for item in items)
    most_options = max(len(item.option_ids) for item in items)
    width = prompt_width + option_width
    batch = PackedBatch(
        input_ids=torch.full((len(items), width), pad_id),
        position_ids=torch.zeros(len(items), width, dtype=torch.long),
        visible=torch.eye(width, dtype=torch.bool).repeat(
            len(items), 1, 1
        ),  # padding sees itself, or softmax gives NaN
        source=torch.zeros(len(items), option_width, dtype=torch.long),
        option=torch.full((len(items), option_width), most_options),
        lengths=torch.zeros(len(items), most_options, dtype=torch.long),
    )
    for row, item in enumerate(items):
        _pack_row(batch, row, item, prompt_width)
    return batch


def _pack_row(batch: PackedBatch, row: int, item: Encoded, prompt_width: int) -> None:
    length = len(item.prompt_ids)
    start = prompt_width - length
    batch.input_ids[row, start:prompt_width] = torch.tensor(item.prompt_ids)
    batch.position_ids[row, start:prompt_width] = torch.arange(length)
    batch.visible[row, start:prompt_width, start:prompt_width] = _causal(length)
    column = prompt_width
    for index, ids in enumerate(item.option_ids):
        end = column + len(ids)
        batch.input_ids[row, column:end] = torch.tensor(ids)
        batch.position_ids[row, column:end] = torch.arange(length, length + len(ids))
        batch.visible[row, column:end, start:prompt_width] = True
        batch.visible[row, column:end, column:end] = _causal(len(ids))
        first = column - prompt_width
        batch.option[row, first : end - prompt_width] = index
        # the first token is predicted by the prompt's last column, every other one by the token before it
        batch.source[row, first + 1 : end - prompt_width] = torch.arange(first + 1, end - prompt_width)
        batch.lengths[row, index] = len(ids)
        column = end


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@dataclass(frozen=True)
class OptionScores:
    """Log-likelihoods of options, ``[B, O]``; ``-inf`` where an item has no such option.

    Attributes:
        total: sum over the option's tokens.
        mean: the same per token. Its softmax over the options is the predicted distribution.
    """

    total: Tensor
    mean: Tensor

    @property
    def log_probabilities(self) -> Tensor:
        """Logarithm of the distribution over the options present."""
        return F.log_softmax(self.mean, dim=-1)

    @property
    def present(self) -> Tensor:
        """``[B, O]``, which options exist."""
        return self.total > -torch.inf


def score_options(model: nn.Module, batch: PackedBatch, inputs_embeds: Tensor | None = None) -> OptionScores:
    """Score all options of a batch in one forward pass of a causal language model.

    Given ``inputs_embeds [B, T, d]``, the model starts from them and not from the tokens' embeddings.
    """
    logits = packed_logits(model, batch, inputs_embeds)
    targets = batch.input_ids[:, -batch.source.shape[1] :]
    rows = torch.arange(len(targets), device=targets.device).unsqueeze(1)
    token = logits[rows, batch.source, targets] - logits.logsumexp(-1).gather(1, batch.source)
    absent = ~batch.present
    sums = torch.zeros(*batch.lengths.shape[:1], batch.lengths.shape[1] + 1, device=token.device, dtype=token.dtype)
    total = sums.scatter_add(1, batch.option, token)[:, :-1]
    mean = total / batch.lengths.clamp(min=1)
    return OptionScores(total.masked_fill(absent, -torch.inf), mean.masked_fill(absent, -torch.inf))


def packed_logits(model: nn.Module, batch: PackedBatch, inputs_embeds: Tensor | None = None) -> Tensor:
    """Logits ``[B, K + 1, vocabulary]`` in float32 of the prompt's last column and of the options."""
    _require_no_window(model, batch.input_ids.shape[1])
    output: Any = model(
        input_ids=batch.input_ids if inputs_embeds is None else None,
        inputs_embeds=inputs_embeds,
        position_ids=batch.position_ids,
        attention_mask=_additive(batch.visible, _dtype(model)),
        use_cache=False,
        logits_to_keep=batch.kept,
    )
    logits: Tensor = output.logits
    return logits.float()


def _require_no_window(model: nn.Module, width: int) -> None:
    """A mask of our own would let sliding-window layers see further than they do by themselves."""
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    if window is not None and width > window:
        raise InputError(
            f"a question with its options takes {width} tokens, and the model attends to {window} only (sliding window); "
            f"use --max-tokens {window // 2} or less, or a model without such a window"
        )


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask ``[B, 1, T, T]`` that attention adds to its scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _dtype(model: nn.Module) -> torch.dtype:
    """Precision of the activations."""
    device = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
