"""Score the options of a question with a shared prompt, in packed batches with little padding.

The options of a question follow its prompt in one sequence, and a row of the batch holds as many questions as fit:

    [prompt | option 1 | option 2 | prompt | option 1 | option 2 | option 3 | padding]

An option attends to its prompt and itself, but to no other option or question, and its positions start where the prompt
ends. Only columns that predict a token of an option get logits. The result equals that of one sequence per option.

Not every model supports this mask: recurrent layers keep a state over the whole row, and some models compute positions
themselves. For those a batch holds one sequence per option (``apart``), without a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
"""All of torch's attention kernels but cuDNN's, which is recompiled for every width of a batch: on an H200 that
took 15 ms of each layer's backward pass, more than half of a training step."""

WIDTHS = (1.0, 1.25, 1.5, 2.0)
"""Candidate widths of a batch, in lengths of its longest question. Wider rows leave fewer columns empty, but attention
grows with the width."""


class Encoded(Protocol):
    """A question as token ids."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of the prompt."""

    @property
    def option_ids(self) -> Sequence[Sequence[int]]:
        """Tokens of every option, which follow the prompt."""


@dataclass(frozen=True)
class PackedBatch:
    """``N`` questions in ``R`` rows of ``T`` columns, with ``S`` tokens of options; ``O`` is the largest number of options.

    Attributes:
        input_ids: ``[R, T]``.
        position_ids: ``[R, T]``, starting anew with every question, and with every option where its prompt ends.
        question: ``[R, T]``, which question a column belongs to, or -1.
        part: ``[R, T]``, its part of the question: the prompt (0) or an option (its number, from 1).
        kept: ``[G, K]``, columns that need logits, counted through all rows, of each of ``G`` blocks of rows.
        source: ``[S]``, which of the kept columns predicts the token of an option.
        target: ``[S]``, that token.
        option: ``[S]``, the option it belongs to, counted through all questions (``O`` for each).
        lengths: ``[N, O]``, tokens per option; 0 where a question has no such option.
        places: row and first column of every question; if apart, of every option with its prompt.
        apart: whether every option has its own row.
    """

    input_ids: Tensor
    position_ids: Tensor
    question: Tensor
    part: Tensor
    kept: Tensor
    source: Tensor
    target: Tensor
    option: Tensor
    lengths: Tensor
    places: tuple[tuple[int, int], ...]
    apart: bool = False

    @property
    def present(self) -> Tensor:
        """``[N, O]``, which options exist."""
        return self.lengths > 0

    @property
    def visible(self) -> Tensor:
        """``[R, T, T]``, which columns (last) a column attends to: its question's prompt and its own option, up to itself."""
        width = self.part.shape[1]
        before = torch.ones(width, width, dtype=torch.bool, device=self.part.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=self.part.device)  # for padding, or softmax gives NaN
        seen, sees = self.part.unsqueeze(1), self.part.unsqueeze(2)
        same = (self.question.unsqueeze(1) == self.question.unsqueeze(2)) & (self.question >= 0).unsqueeze(2)
        return before & same & ((seen == 0) | (seen == sees)) | itself

    @property
    def used(self) -> Tensor:
        """``[R, T]``, tokens that a score depends on: neither padding nor the last one of an option."""
        used = (self.part == 0) & (self.question >= 0)
        used.view(-1)[self.kept.flatten()[self.source]] = True
        return used

    def to(self, device: torch.device) -> PackedBatch:
        """Copy the batch to another device asynchronously."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return replace(self, **moved)


def packed_length(item: Encoded) -> int:
    """Tokens of a question with all its options."""
    return len(item.prompt_ids) + sum(map(len, item.option_ids))


class _Unit(NamedTuple):
    """A contiguous piece of a row: a question's prompt, and the options that follow it."""

    question: int
    options: Sequence[int]
    length: int


def _units(items: Sequence[Encoded], apart: bool) -> list[_Unit]:
    """Each question with all its options, or with one at a time."""
    units = []
    for number, item in enumerate(items):
        every = range(len(item.option_ids))
        for options in [(k,) for k in every] if apart else [every]:
            units.append(_Unit(number, options, len(item.prompt_ids) + sum(len(item.option_ids[k]) for k in options)))
    return units


def pack(
    items: Sequence[Encoded], pad_id: int = 0, *, multiple: int = 1, blocks: int = 1, apart: bool = False
) -> PackedBatch:
    """Pack encoded questions into one batch.

    It is filled in numpy: on small slices torch takes several times as long, which slows every training step.

    Args:
        items: the questions.
        pad_id: padding token.
        multiple: the width is a multiple of this; attention on a GPU is faster with multiples of 8.
        blocks: number of blocks of rows to divide the questions among, in turn, one block per draw in use.
        apart: put every option in its own row.
    """
    units = _units(items, apart)
    members = [[k for k, unit in enumerate(units) if unit.question % blocks == block] for block in range(blocks)]
    layout = _fewest_columns([unit.length for unit in units], members, (0.0,) if apart else WIDTHS)
    shape = layout.rows, -(-layout.width // multiple) * multiple
    filling = _Filling.empty(items, layout.places, shape, pad_id, blocks)
    for number, unit in enumerate(units):
        filling.add(number, unit, items[unit.question])
    return filling.batch(apart)


class _Layout(NamedTuple):
    """Row and first column of every unit, number of rows, and their width."""

    places: list[tuple[int, int]]
    rows: int
    width: int


def _fewest_columns(lengths: Sequence[int], members: Sequence[Sequence[int]], widths: Sequence[float]) -> _Layout:
    """Of the candidate widths, the layout with the fewest columns in total; the narrowest if several are equal."""
    layouts = [_in_blocks(lengths, members, int(share * max(lengths))) for share in widths]
    return min(layouts, key=lambda layout: (layout.rows * layout.width, layout.width))


def _in_blocks(lengths: Sequence[int], members: Sequence[Sequence[int]], most: int) -> _Layout:
    """Stack the layouts of the blocks, each with as many rows as the largest needs."""
    parts = [_first_fit([lengths[k] for k in own], most) for own in members]
    rows, width = max(part.rows for part in parts), max(part.width for part in parts)
    places = [(0, 0)] * len(lengths)
    for block, (own, part) in enumerate(zip(members, parts, strict=True)):
        for k, (row, column) in zip(own, part.places, strict=True):
            places[k] = (block * rows + row, column)
    return _Layout(places, len(members) * rows, width)


def _first_fit(lengths: Sequence[int], most: int) -> _Layout:
    """First-fit packing: longest first, each unit goes into the first row with room for it, or into a new one."""
    filled: list[int] = []
    places = [(0, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        length = lengths[number]
        row = next((k for k, used in enumerate(filled) if used + length <= most), len(filled))
        if row == len(filled):
            filled.append(0)
        places[number] = (row, filled[row])
        filled[row] += length
    return _Layout(places, len(filled), max(filled))


@dataclass
class _Filling:
    """The arrays of a batch while it is filled; ``kept`` and ``source`` are per block."""

    input_ids: Integers
    position_ids: Integers
    question: Integers
    part: Integers
    lengths: Integers
    places: list[tuple[int, int]]
    kept: list[list[int]]
    source: list[tuple[int, int]]
    target: list[int]
    option: list[int]

    @classmethod
    def empty(
        cls,
        items: Sequence[Encoded],
        places: list[tuple[int, int]],
        shape: tuple[int, int],
        pad_id: int,
        blocks: int,
    ) -> _Filling:
        most_options = max(len(item.option_ids) for item in items)
        return cls(
            input_ids=np.full(shape, pad_id),
            position_ids=np.zeros(shape, dtype=np.int64),
            question=np.full(shape, -1),
            part=np.zeros(shape, dtype=np.int64),
            lengths=np.zeros((len(items), most_options), dtype=np.int64),
            places=places,
            kept=[[] for _ in range(blocks)],
            source=[],
            target=[],
            option=[],
        )

    def add(self, number: int, unit: _Unit, item: Encoded) -> None:
        """Write a question, or a part of it, to its position."""
        row, start = self.places[number]
        length, question = len(item.prompt_ids), unit.question
        column = start + length
        self.input_ids[row, start:column] = item.prompt_ids
        self.position_ids[row, start:column] = np.arange(length)
        block = question % len(self.kept)
        kept, before = self.kept[block], row * self.input_ids.shape[1]
        last_of_prompt = len(kept)
        kept.append(before + column - 1)
        for index in unit.options:
            ids = item.option_ids[index]
            end = column + len(ids)
            self.input_ids[row, column:end] = ids
            self.position_ids[row, column:end] = np.arange(length, length + len(ids))
            self.part[row, column:end] = index + 1
            self.lengths[question, index] = len(ids)
            # the first token is predicted by the prompt's last column, every other one by the token before it
            predicted_by = [last_of_prompt, *range(len(kept), len(kept) + len(ids) - 1)]
            self.source += [(block, source) for source in predicted_by]
            kept += range(before + column, before + end - 1)
            self.target += ids
            self.option += [question * self.lengths.shape[1] + index] * len(ids)
            column = end
        self.question[row, start:column] = question

    def batch(self, apart: bool) -> PackedBatch:
        """Make the batch; blocks that keep fewer columns than others repeat their last."""
        most = max(map(len, self.kept))
        kept = [[*columns, *[columns[-1]] * (most - len(columns))] for columns in self.kept]
        return PackedBatch(
            input_ids=torch.from_numpy(self.input_ids),
            position_ids=torch.from_numpy(self.position_ids),
            question=torch.from_numpy(self.question),
            part=torch.from_numpy(self.part),
            kept=torch.tensor(kept),
            source=torch.tensor([block * most + source for block, source in self.source]),
            target=torch.tensor(self.target),
            option=torch.tensor(self.option),
            lengths=torch.from_numpy(self.lengths),
            places=tuple(self.places),
            apart=apart,
        )


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
    model: nn.Module, batch: PackedBatch, inputs_embeds: Tensor | None = None, copies: int = 1
) -> OptionScores:
    """Score all options of a batch in one forward pass of a causal language model.

    The model receives the batch ``copies`` times, in blocks, one per draw. Scores have as many blocks as the model's output,
    which are more if it repeats the batch itself. ``inputs_embeds [R, T, d]`` replace the tokens' embeddings if given.
    """
    logits = packed_logits(model, batch, inputs_embeds, copies)
    token = logits[:, batch.source, batch.target] - logits.logsumexp(-1)[:, batch.source]
    sums = token.new_zeros(len(token), batch.lengths.numel()).index_add(1, batch.option, token)
    total = sums.view(-1, batch.lengths.shape[1])
    lengths, absent = (each.repeat(len(token), 1) for each in (batch.lengths, ~batch.present))
    mean = total / lengths.clamp(min=1)
    return OptionScores(total.masked_fill(absent, -torch.inf), mean.masked_fill(absent, -torch.inf))


def packed_logits(model: nn.Module, batch: PackedBatch, inputs_embeds: Tensor | None = None, copies: int = 1) -> Tensor:
    """Logits ``[blocks, G · K, vocabulary]`` in float32 of the columns kept."""
    with sdpa_kernel(ATTENTION), _picking(model, batch) as picks:
        output: Any = model(
            input_ids=_repeat(batch.input_ids, copies) if inputs_embeds is None else None,
            inputs_embeds=None if inputs_embeds is None else _repeat(inputs_embeds, copies),
            use_cache=False,
            **{name: _repeat(tensor, copies) for name, tensor in _layout_for(model, batch).items()},
        )
    logits: Tensor = output.logits if picks else _pick(output.logits, batch)
    return logits.reshape(-1, batch.kept.numel(), logits.shape[-1]).float()


@contextmanager
def _picking(model: nn.Module, batch: PackedBatch) -> Iterator[list[Tensor]]:
    """Inside the block the output head only receives the kept columns; the list is filled if it did.

    transformers' own ``logits_to_keep`` can only keep the same columns of every row.
    """
    picks: list[Tensor] = []

    def pick(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        picks[:] = [_pick(args[0], batch)]
        return (picks[0], *args[1:])

    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    # before other hooks: draws that begin at the head then only repeat the kept columns
    handle = None if head is None else head.register_forward_pre_hook(pick, prepend=True)
    try:
        yield picks
    finally:
        if handle is not None:
            handle.remove()


def _pick(values: Tensor, batch: PackedBatch) -> Tensor:
    """Of ``[blocks · R, T, d]`` the columns kept, ``[blocks · G, K, d]``."""
    columns = values.reshape(-1, batch.input_ids.numel(), values.shape[-1])
    return columns.index_select(1, batch.kept.flatten()).reshape(-1, batch.kept.shape[1], values.shape[-1])


def _repeat(tensor: Tensor, copies: int) -> Tensor:
    return tensor if copies == 1 else tensor.repeat(copies, *[1] * (tensor.ndim - 1))


def _layout_for(model: nn.Module, batch: PackedBatch) -> dict[str, Tensor]:
    """Positions and mask of a batch for a model."""
    if batch.apart:  # padding is at the end, where a causal model does not attend
        return {}
    window = attention_window(model)
    if window is not None and (longest := int(batch.position_ids.max()) + 1) > window:
        raise InputError(
            f"a question with its longest option takes {longest} tokens, and the model attends to {window} only (sliding "
            "window); pack them with apart=True"
        )
    return {"position_ids": batch.position_ids, "attention_mask": _additive(batch.visible, _dtype(model))}


def attention_window(model: nn.Module) -> int | None:
    """Width of sliding-window attention, or ``None``. A custom mask would extend the window, or count columns of others."""
    config = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    found = [getattr(config, name, None) for name in ("sliding_window", "window_size", "attention_chunk_size")]
    return min((window for window in found if isinstance(window, int)), default=None)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask ``[B, 1, T, T]`` that attention adds to its scores."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _dtype(model: nn.Module) -> torch.dtype:
    """Precision of the activations."""
    device = next(model.parameters()).device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
