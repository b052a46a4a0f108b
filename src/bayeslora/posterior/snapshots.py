"""Mixtures over snapshots of a distribution, taken during its training (methods entry 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bayeslora.posterior.factors import Factors
from bayeslora.posterior.noise import Noise


@dataclass(frozen=True)
class Snapshots:
    """How many snapshots training takes and keeps; none by default.

    Attributes:
        taken: number of snapshots taken in a training run, equally spaced, the last one at its end.
        kept: how many of the last ones form the mixture.
    """

    taken: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        if self.taken < 0 or self.kept < 0 or self.kept > self.taken or (self.taken > 0) != (self.kept > 0):
            raise ValueError(
                f"members must be at least 1 and at most snapshots, or both 0, got {self.kept} of {self.taken}"
            )

    def due(self, step: int, steps: int) -> bool:
        """Whether a snapshot is due after ``step`` of ``steps``, counted from 1."""
        share = self.taken / steps
        return int(step * share + 1e-9) > int((step - 1) * share + 1e-9)


def balanced_choice(n: int, members: int, source: Noise) -> list[int]:
    """``n`` member indices in random order; their counts differ by at most one."""
    rounds = [source.order(members) for _ in range(-(-n // members))]
    return [member for order in rounds for member in order][:n]


def side_by_side(A: Sequence[Tensor], B: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """``1/K Σ_k B_k A_k`` of members ``A [L, K, R, i]`` and ``B [L, K, o, R]`` as one pair of factors of rank ``K R``."""
    wide = tuple(a.flatten(1, 2).unsqueeze(1) for a in A)
    tall = tuple(b.mT.flatten(1, 2).mT.unsqueeze(1) / b.shape[1] for b in B)
    return wide, tall


def take_turns(parts: Sequence[Factors]) -> Factors:
    """Interleave the draws of several members: the first draw of each, then the second draw of each, and so on.

    All members have equally many draws, except the last ones, which may have one less.
    """
    counts = [part.n for part in parts]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    order = [starts[k] + j for j in range(counts[0]) for k in range(len(counts)) if j < counts[k]]

    def join(stacks: Sequence[Tensor]) -> Tensor:
        whole = [stack.expand(-1, count, *stack.shape[2:]) for stack, count in zip(stacks, counts, strict=True)]
        return torch.cat(whole, dim=1)[:, order]

    A, B = (tuple(map(join, zip(*sides, strict=True))) for sides in ([p.A for p in parts], [p.B for p in parts]))
    inners = tuple(
        replace(same[0], tensors=tuple(map(join, zip(*(inner.tensors for inner in same), strict=True))))
        for same in zip(*(part.inners for part in parts), strict=True)
    )
    return replace(parts[0], A=A, B=B, inners=inners, latents=None)
