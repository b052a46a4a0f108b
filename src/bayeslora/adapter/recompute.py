"""Inputs of adapted layers that are computed again in the backward pass instead of kept.

The gradient of ``A`` needs the layer's input. Where that is cheap to compute from tensors that are kept anyway, such as a
normalised one, whoever made it says so with :func:`recomputable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MARK = "_bayeslora_recipe"


class Recipe(NamedTuple):
    """How to compute a tensor again."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def recomputable(output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Note on ``output`` that it is ``function(*inputs)``, whose inputs are kept until the backward pass in any case.

    Without gradients nothing is noted: the note would keep the inputs alive.
    """
    if torch.is_grad_enabled():
        setattr(output, MARK, Recipe(function, inputs))
    return output


def project(x: Tensor, A: Tensor) -> Tensor:
    """``A x`` of every draw, ``[n, tokens, R]``: ``x`` is in ``n`` equal blocks of rows, and ``A`` is ``[n, R, i]``."""
    recipe: Recipe | None = getattr(x, MARK, None)
    if recipe is None or not A.requires_grad or not torch.is_grad_enabled() or _mixed_precision(x):
        return torch.bmm(_blocks(x, len(A)), A.mT)
    found: Tensor = _Project.apply(x, A, recipe.function, *recipe.inputs)
    return found


def _mixed_precision(x: Tensor) -> bool:
    """Whether autocast chooses the precision, which it does for the forward pass only."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _blocks(x: Tensor, n: int) -> Tensor:
    return x.reshape(n, -1, x.shape[-1])


class _Project(torch.autograd.Function):
    """``A x``, which keeps what ``x`` is computed from instead of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(A, *inputs)
        ctx.function, ctx.shape = function, x.shape
        return torch.bmm(_blocks(x, len(A)), A.mT)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        A, *inputs = ctx.saved_tensors
        (slope,) = slopes
        by_x = torch.bmm(slope, A).view(ctx.shape) if ctx.needs_input_grad[0] else None
        by_A = torch.bmm(slope.mT, _blocks(ctx.function(*inputs), len(A)))
        return by_x, by_A, None, *(None for _ in inputs)
