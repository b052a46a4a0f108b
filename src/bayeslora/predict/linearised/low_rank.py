"""Sums of outer products of many long vectors, of which only the largest directions are kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.posterior.decompose import eigh

WHOLE = 2048
"""Sums over vectors no longer than this are kept whole, 16 MiB each, and decomposed once: on a GPU that is what takes time."""

SPARE = 4
"""While vectors arrive, so many times the directions wanted are kept: what is cut early cannot come back."""

EXACT = 1024
"""Matrices whose shorter side is longer than this are cut to a random subspace before they are decomposed."""

_ROUNDS = 4
"""Passes that turn the random subspace to the largest directions."""


class LowRankSum:
    """``Σ v vᵀ`` as ``W Wᵀ`` with ``rank`` columns: the largest directions of the sum.

    Of long vectors, every batch is decomposed with what was kept of those before. That is exact, whatever the batches, as long as
    the vectors span no more than ``SPARE · rank`` directions.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sum: Tensor | None = None
        self._rows: Tensor | None = None

    def add(self, vectors: Tensor) -> None:
        """Take in vectors ``[m, d]``."""
        if vectors.shape[1] <= WHOLE:
            part = vectors.mT @ vectors
            self._sum = part if self._sum is None else self._sum.add_(part)
            return
        rows = vectors if self._rows is None else torch.cat([self._rows, vectors])
        self._rows = _largest(rows, SPARE * self.rank)

    def root(self) -> Tensor:
        """``W [d, rank]``; columns that nothing is left for are zero."""
        if self._sum is not None:
            rows = _largest_of(self._sum, self.rank)
        else:
            assert self._rows is not None
            rows = _largest(self._rows, self.rank)
        return F.pad(rows, (0, 0, 0, self.rank - len(rows))).mT


def _largest(rows: Tensor, count: int) -> Tensor:
    """At most ``count`` rows with the same largest directions of ``rowsᵀ rows``, and these to full length."""
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
    """The same, of ``rowsᵀ rows`` itself."""
    values, vectors = eigh(gram)
    return (values[-count:].clamp(min=0.0).sqrt() * vectors[:, -count:]).mT


def _subspace(rows: Tensor, size: int) -> Tensor:
    """An orthonormal basis ``[d, size]`` of about the largest directions; of all of them, if there are no more."""
    noise = torch.randn(rows.shape[1], size, generator=torch.Generator().manual_seed(0)).to(rows)
    basis = torch.linalg.qr(noise).Q
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(rows.mT @ (rows @ basis)).Q
    return basis
