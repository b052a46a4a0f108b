"""Gradients of a draw under re-entrant gradient checkpointing.

Re-entrant checkpointing runs a separate backward pass for every block. The factors of all blocks come from one graph
(the draw), which the second block would find freed. So the layers get *leaves* instead, cut from the draw; each block's
backward adds to their ``.grad``. The leaves are tied to the draw by an identity on the first activation of the network:
its backward runs after that of every block, and hands the collected gradients on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Bridge:
    """Leaves for the layers, and the identity that connects them to the draw they were cut from."""

    def __init__(self, drawn: Sequence[Tensor]) -> None:
        self._drawn = tuple(drawn)
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in drawn)
        self.crossed = False

    def cross(self, activation: Tensor) -> Tensor:
        """The activation unchanged, with the draw hung behind it in the graph."""
        self.crossed = True
        crossed: Tensor = _Identity.apply(activation, self.leaves, *self._drawn)
        return crossed


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, leaves: tuple[Tensor, ...], *drawn: Tensor) -> Tensor:
        ctx.leaves = leaves
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        collected = tuple(leaf.grad for leaf in ctx.leaves)
        for leaf in ctx.leaves:
            leaf.grad = None
        return (grads[0], None, *collected)


def uses_reentrant_checkpointing(modules: Sequence[nn.Module]) -> bool:
    """Whether any of these modules is checkpointed by transformers in the re-entrant way."""
    for module in modules:
        if getattr(module, "gradient_checkpointing", False) and module.training:
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("use_reentrant", False):
                return True
    return False
