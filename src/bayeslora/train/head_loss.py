"""Cross-entropy of many tokens without the logits of all of them in memory.

With a vocabulary of 150,000 words the logits of a batch take more memory than all else. Here the output head sees a slice of
the tokens at a time, and what a slice leaves behind is its losses and their gradient with respect to the head's input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bayeslora.adapter.sampling import evaluating

CELLS = 2**25
"""Logits of one slice: an eighth of a GiB in float32."""


def head_input(model: nn.Module, input_ids: Tensor, head: nn.Module) -> Tensor:
    """Run the model up to its output head, and return what the head would receive, ``[B, T, d]``."""
    with _without_head(head) as seen:
        model(input_ids=input_ids, use_cache=False)
    return seen[0]


def sliced_cross_entropy(
    states: Tensor, head: nn.Module, targets: Tensor, counted: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy of every target that counts, in float32.

    Args:
        states: ``[B, T, d]``, the head's input.
        head: the output head. If it is a plain frozen layer, each slice is computed once; otherwise again in the backward pass.
        targets: ``[B, T]``, the next tokens.
        counted: ``[K]``, positions of the targets that count, through all rows.
        smoothing: share of the target that is spread evenly over the vocabulary.
    """
    if is_frozen_linear(head):
        part, wanted = states.flatten(0, 1).index_select(0, counted), targets.flatten().index_select(0, counted)
        losses: Tensor = _FrozenHead.apply(part, wanted, head.weight, head.bias, smoothing)
        return losses

    def of(part: Tensor, wanted: Tensor) -> Tensor:
        logits = head(part).float().flatten(0, 1)
        losses = F.cross_entropy(logits, wanted.flatten(), reduction="none", label_smoothing=smoothing)
        return losses.view(wanted.shape)

    size = _slice_size(int(head.out_features) * len(states))  # type: ignore[arg-type]
    parts = zip(states.split(size, 1), targets.split(size, 1), strict=True)
    every = torch.cat([checkpoint(of, *part, use_reentrant=False) for part in parts], 1)
    return every.flatten().index_select(0, counted)


@torch.no_grad()
def find_sliceable_head(model: nn.Module) -> nn.Module | None:
    """The output head if it can be applied to slices of tokens, or ``None``.

    It cannot if the model changes the logits after it (some bound or scale them), which is found by running one token, if
    its weight is divided among processes, or if nothing tells its size.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "out_features", None), int):
        return None
    if any(hasattr(parameter, "device_mesh") for parameter in head.parameters()):
        return None
    outputs: list[Tensor] = []
    handle = head.register_forward_hook(lambda head, args, output: outputs.append(output))
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            found: Any = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    finally:
        handle.remove()
    return head if len(outputs) == 1 and found.logits is outputs[0] else None


@contextmanager
def _without_head(head: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the block the head receives no token; what it would have received is in the list."""
    seen: list[Tensor] = []

    def withhold(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(args[0])
        return (args[0][:, :0], *args[1:])

    handle = head.register_forward_pre_hook(withhold, prepend=True)
    try:
        yield seen
    finally:
        handle.remove()


def is_frozen_linear(head: nn.Module | None) -> bool:
    """Whether a head is a plain layer that is not trained."""
    return type(head) is nn.Linear and not any(parameter.requires_grad for parameter in head.parameters())


def _slice_size(cells_of_one: int) -> int:
    return max(1, CELLS // cells_of_one)


class _FrozenHead(torch.autograd.Function):
    """Losses ``[N]`` of tokens whose head is ``weight`` and ``bias``; the gradient of each is made beside it."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, smoothing: float
    ) -> Tensor:
        losses = states.new_empty(len(states), dtype=torch.float32)
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        size = _slice_size(len(weight))
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = F.linear(states[part], weight, bias).float()
            wanted = targets[part].unsqueeze(1)
            aim = (1.0 - smoothing) * logits.gather(1, wanted)
            if smoothing:
                aim += smoothing * logits.mean(1, keepdim=True)
            most = logits.amax(1, keepdim=True)
            parts = logits.sub_(most).exp_()  # in place: the logits of a slice are there once
            whole = parts.sum(1, keepdim=True)
            losses[part] = (most + whole.log() - aim).squeeze(1)
            if gradient is not None:  # softmax less the target distribution, times the weight
                slope = parts.div_(whole)
                if smoothing:
                    slope -= smoothing / len(weight)
                slope.scatter_add_(1, wanted, slope.new_full((), smoothing - 1.0).expand_as(wanted))
                torch.mm(slope.to(weight.dtype), weight, out=gradient[part])
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        made = None if gradient is None else gradient * slopes[0].unsqueeze(1).to(gradient.dtype)
        return made, None, None, None, None
