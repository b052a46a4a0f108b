"""Rotary position embeddings with half the memory traffic.

Hugging Face's models turn queries and keys by ``x · cos + rotate_half(x) · sin``: five operators, and as many in the backward
pass. Here it is one product over all of ``x`` and two over half of it that add to the first in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"
"""What the function is called in the modules of the architectures."""
PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]

Rotate = Callable[..., tuple[Tensor, Tensor]]


def lean_attention(module: nn.Module) -> Callable[..., Any] | None:
    """The forward pass of an attention layer with lean rotary embeddings, or ``None`` if it has none of the known kind.

    It is the layer's own code, in which one name stands for another function.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
        return None
    rotate: Any = forward.__globals__.get(NAME)
    if not _is_rotation(rotate):
        return None
    names = forward.__globals__ | {NAME: lean_rotation(rotate)}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(copy, module)


def lean_rotation(rotate: Rotate) -> Rotate:
    """A function in the place of ``rotate``, which still turns what is of several precisions or needs gradients of angles."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if len({q.dtype, k.dtype, cos.dtype, sin.dtype}) > 1 or cos.requires_grad or sin.requires_grad:
            return rotate(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)

    return rotated


@torch.no_grad()
def _is_rotation(rotate: Any) -> bool:
    """Whether a function turns queries and keys by the known formula, by running it on numbers."""
    if not isinstance(rotate, FunctionType) or list(inspect.signature(rotate).parameters) != PARAMETERS:
        return False
    q, k = torch.linspace(-2.0, 3.0, 48).view(1, 2, 3, 8), torch.linspace(1.0, 2.0, 24).view(1, 1, 3, 8)
    cos, sin = torch.linspace(0.1, 0.9, 24).view(1, 3, 8), torch.linspace(-0.7, 0.8, 24).view(1, 3, 8)
    wanted, found = rotate(q, k, cos, sin), lean_rotation(rotate)(q, k, cos, sin)
    return all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5) for ours, theirs in zip(found, wanted, strict=True))


class _Rotation(torch.autograd.Function):
    """``x · cos + rotate_half(x) · sin``. The backward pass needs the angles alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (left, right), (sin_left, sin_right) = x.chunk(2, -1), sin.chunk(2, -1)
        return _plus_crossed(x * cos, -1.0, right, sin_left, left, sin_right)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        (slope,) = slopes
        (left, right), (sin_left, sin_right) = slope.chunk(2, -1), sin.chunk(2, -1)
        return _plus_crossed(slope * cos, 1.0, right, sin_right, left, sin_left), None, None


def _plus_crossed(y: Tensor, sign: float, right: Tensor, to_left: Tensor, left: Tensor, to_right: Tensor) -> Tensor:
    """Adds ``sign · right · to_left`` to the left half of ``y`` and ``-sign · left · to_right`` to the right one, in place."""
    on_left, on_right = y.chunk(2, -1)
    on_left.addcmul_(right, to_left, value=sign)
    on_right.addcmul_(left, to_right, value=-sign)
    return y
