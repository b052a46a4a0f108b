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
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayeslora.errors import InputError

Integers = NDArray[np.int64]

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's attention kernels but cuDNN's, which compiles itself anew for every width of a batch: on an H200 that
took 15 ms of each layer's backward pass, more than half of a training step."""


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
        part: ``[B, T]``, what a column belongs to: the prompt (0), an option (its number, from 1) or nothing (-1).
        source: ``[B, K]``, for every option token the kept column whose logits predict it (column 0 is the prompt's last).
        option: ``[B, K]``, which option the token belongs to; ``O`` for padding.
        lengths: ``[B, O]``, tokens per option; 0 where an item has no such option.
    """

    input_ids: Tensor
    position_ids: Tensor
    part: Tensor
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
    def visible(self) -> Tensor:
        """``[B, T, T]``, which columns (last) a column sees: of what is not after it, the prompt and its own option."""
        width = self.part.shape[1]
        seen, sees = self.part.unsqueeze(1), self.part.unsqueeze(2)
        before = torch.ones(width, width, dtype=torch.bool, device=self.part.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=self.part.device)  # for padding, or softmax gives NaN
        return before & ((seen == 0) | ((seen == sees) & (seen > 0))) & (sees >= 0) | itself

    @property
    def used(self) -> Tensor:
        """``[B, T]``, tokens that a score depends on: neither padding nor the last one of an option."""
        prompt_width = self.input_ids.shape[1] - self.source.shape[1]
        prompt = self.part[:, :prompt_width] == 0
        columns = torch.arange(self.source.shape[1], device=self.source.device)
        followed = (self.source == columns)[:, 1:]  # by a token that it predicts
        return F.pad(torch.cat([prompt, followed], dim=1), (0, 1))

    def repeat(self, n: int) -> PackedBatch:
        """The batch ``n`` times in blocks, one for each draw."""
        if n == 1:
            return self
        return PackedBatch(
            *(getattr(self, f.name).repeat(n, *[1] * (getattr(self, f.name).ndim - 1)) for f in fields(self))
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device."""
        return PackedBatch(*(getattr(self, f.name).to(device) for f in fields(self)))


def pack(items: Sequence[Encoded], pad_id: int = 0) -> PackedBatch:
    """Pack encoded items into one batch.

    Rows are filled in numpy: on small slices torch takes several times as long, which is felt in every step of training.
    """
    prompt_width = max(len(item.prompt_ids) for item in items)
    option_width = max(sum(map(len, item.option_ids)) for item in items)
    most_options = max(len(item.option_ids) for item in items)
    width = prompt_width + option_width
    rows = _Rows(
        input_ids=np.full((len(items), width), pad_id),
        position_ids=np.zeros((len(items), width), dtype=np.int64),
        part=np.full((len(items), width), -1),
        source=np.zeros((len(items), option_width), dtype=np.int64),
        option=np.full((len(items), option_width), most_options),
        lengths=np.zeros((len(items), most_options), dtype=np.int64),
    )
    for row, item in enumerate(items):
        _pack_row(rows, row, item, prompt_width)
    return PackedBatch(*map(torch.from_numpy, rows))


class _Rows(NamedTuple):
    """The arrays of a batch, in the order of its fields."""

    input_ids: Integers
    position_ids: Integers
    part: Integers
    source: Integers
    option: Integers
    lengths: Integers


def _pack_row(rows: _Rows, row: int, item: Encoded, prompt_width: int) -> None:
    length = len(item.prompt_ids)
    start = prompt_width - length
    rows.input_ids[row, start:prompt_width] = item.prompt_ids
    rows.position_ids[row, start:prompt_width] = np.arange(length)
    rows.part[row, start:prompt_width] = 0
    column = prompt_width
    for index, ids in enumerate(item.option_ids):
        end = column + len(ids)
        rows.input_ids[row, column:end] = ids
        rows.position_ids[row, column:end] = np.arange(length, length + len(ids))
        rows.part[row, column:end] = index + 1
        first = column - prompt_width
        rows.option[row, first : end - prompt_width] = index
        # the first token is predicted by the prompt's last column, every other one by the token before it
        rows.source[row, first + 1 : end - prompt_width] = np.arange(first + 1, end - prompt_width)
        rows.lengths[row, index] = len(ids)
        column = end


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


def score_options(
    model: nn.Module, batch: PackedBatch, inputs_embeds: Tensor | None = None, blocks: int = 1
) -> OptionScores:
    """Score all options of a batch in one forward pass of a causal language model.

    Given ``inputs_embeds [B, T, d]``, the model starts from them and not from the tokens' embeddings. ``blocks`` is how
    many times over the model answers a batch that it is given once.
    """
    logits = packed_logits(model, batch, inputs_embeds)
    batch = batch.repeat(blocks)
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
    with sdpa_kernel(ATTENTION):
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
