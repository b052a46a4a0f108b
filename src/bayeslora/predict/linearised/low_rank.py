"""Low-rank sums of outer products of many long vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.posterior.decompose import eigh

WHOLE = 2048
"""Longest vectors whose sum is stored exactly, 16 MiB each, and decomposed once: on a GPU decompositions dominate."""

SPARE = 4
"""Oversampling factor of the rank while vectors arrive, since directions dropped early cannot be recovered."""

EXACT = 1024
"""Matrices whose shorter side is longer than this are projected to a random subspace before the decomposition."""

_ROUNDS = 4
"""Power iterations that align the random subspace with the largest directions."""


class LowRankSum:
    """``Σ v vᵀ`` as ``W Wᵀ`` with ``rank`` columns: the largest directions of the sum.

    For long vectors, every batch is decomposed together with the directions kept so far. That is exact, whatever the batches,
    as long as the vectors span no more than ``SPARE · rank`` directions.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sum: Tensor | None = None
        self._rows: Tensor | None = None

    def add(self, vectors: Tensor) -> None:
        """Add vectors ``[m, d]``."""
        if vectors.shape[1] <= WHOLE:
            part = vectors.mT @ vectors
            self._sum = part if self._sum is None else self._sum.add_(part)
            return
        rows = vectors if self._rows is None else torch.cat([self._rows, vectors])
        self._rows = _largest(rows, SPARE * self.rank)

    def root(self) -> Tensor:
        """``W [d, rank]``; surplus columns are zero."""
        if self._sum is not None:
            rows = _largest_of(self._sum, self.rank)
        else:
            assert self._rows is not None
            rows = _largest(self._rows, self.rank)
        return F.pad(rows, (0, 0, 0, self.rank - len(rows))).mT


def _largest(rows: Tensor, count: int) -> Tensor:
    """At most ``count`` rows that keep the largest directions of ``rowsᵀ rows`` with their full lengths."""
    if len(rows) <= count:
        return rows
    if min(rows.shape) > max(EXACT, 2 * count):
        basis = _subspace(rows, 2 * count)
        return _largest(rows @ basis, count) @ basis.mT
    if rows.shape[0] < rows.shape[1]:
        _, vectors = eigh(rows @ rows.mT)
        return vectors[:, -count:].mT @ rows
    return _largest_of(rows.mT @ rows, count)


def _largest_of(gram: Tensor, count: int) -> Tensor:
    """As :func:`_largest`, given ``rowsᵀ rows``."""
    values, vectors = eigh(gram)
    return (values[-count:].clamp(min=0.0).sqrt() * vectors[:, -count:]).mT


def _subspace(rows: Tensor, size: int) -> Tensor:
    """An orthonormal basis ``[d, size]`` of approximately the largest directions, or of all if there are fewer."""
    noise = torch.randn(rows.shape[1], size, generator=torch.Generator().manual_seed(0)).to(rows)
    basis = torch.linalg.qr(noise).Q
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(rows.mT @ (rows @ basis)).Q
    return basis
