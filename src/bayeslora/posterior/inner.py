"""The computation of a layer before its factor ``B``, where it is more than ``A x``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inner(ABC):
    """The inner half of an update ``B · inner(x)``.

    Attributes:
        tensors: its tensors, stacked by layer like the factors, ``[L, n, ...]``; a layer gets its own row.
    """

    tensors: tuple[Tensor, ...] = ()

    @abstractmethod
    def __call__(self, x: Tensor, A: Tensor) -> Tensor:
        """``[n, b, t, R]`` for inputs ``x [n, b, t, i]`` (draws, rows, positions) and ``A [n, R, i]``."""

    def unbind(self, layers: int, dtype: torch.dtype | None = None) -> list[Self]:
        """The parts of all layers of the stack, optionally in another precision."""
        stacks = [tensor.to(dtype or tensor.dtype).unbind(0) for tensor in self.tensors]
        return [replace(self, tensors=tuple(stack[row] for stack in stacks)) for row in range(layers)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with a function applied to all tensors."""
        return replace(self, tensors=tuple(map(function, self.tensors)))


@dataclass(frozen=True, kw_only=True)
class InputDropout(Inner):
    """``A (z ⊙ x) / (1 − p)`` with ``z`` Bernoulli, drawn independently for every position (methods entry 2)."""

    p: float

    def __call__(self, x: Tensor, A: Tensor) -> Tensor:
        """Apply dropout, then ``A``. Masks come from torch's global generator, which checkpointing restores."""
        return F.dropout(x, self.p) @ A.mT.unsqueeze(1)


@dataclass(frozen=True, kw_only=True)
class Flipout(Inner):
    """``A x + v ⊙ (N (u ⊙ x))`` with one noise ``N [n, R, i]`` and random signs ``u``, ``v`` (methods entry 7).

    Different signs make the noise of different rows almost independent, at the cost of one draw.

    Attributes:
        tensors: ``N``, the noise of ``A``.
        per: unit with its own signs: every ``token``, or every ``sequence``, whose tokens then share the same weights.
    """

    per: Literal["token", "sequence"]

    def __call__(self, x: Tensor, A: Tensor) -> Tensor:
        """Apply ``A`` with flipout noise. Signs come from torch's global generator, which checkpointing restores."""
        (noise,) = self.tensors
        n, rows, positions, features = x.shape
        own = positions if self.per == "token" else 1
        u, v = random_signs((n, rows, own, features + A.shape[1]), x).split((features, A.shape[1]), dim=-1)
        return x @ A.mT.unsqueeze(1) + v * ((u * x) @ noise.mT.unsqueeze(1))


def random_signs(shape: Sequence[int], like: Tensor) -> Tensor:
    """Plus or minus one, equally likely, from torch's global generator."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_().mul_(2.0).sub_(1.0)
