"""Precisions ``Λ = S ⊗ C + τ I`` of matrices with one short and one long side, in closed form (methods entry 9).

A matrix is ``[R, d]`` and flattened by rows. ``S [R, R]`` acts on its short side. ``C [d, d]`` acts on its long side and
is of rank ``k``. With ``S = U diag(s) Uᵀ`` and ``C = Q diag(c) Qᵀ`` the products ``s_i c_j`` are the eigenvalues of
``S ⊗ C``, and in all other directions ``Λ`` is ``τ``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bayeslora.posterior.decompose import eigh, svd


@dataclass(frozen=True)
class Spectrum:
    """``S ⊗ C`` of ``L`` matrices in its eigenbasis.

    Attributes:
        small_vectors: ``U [L, R, R]``.
        small_values: ``s [L, R]``.
        long_vectors: ``Q [L, d, k]``; a column whose eigenvalue is zero may be zero itself.
        long_values: ``c [L, k]``.
    """

    small_vectors: Tensor
    small_values: Tensor
    long_vectors: Tensor
    long_values: Tensor

    @property
    def eigenvalues(self) -> Tensor:
        """``s_i c_j``, ``[L, R, k]``."""
        return self.small_values.unsqueeze(-1) * self.long_values.unsqueeze(-2)

    def inverse_root(self, x: Tensor, precision: Tensor) -> Tensor:
        """``Λ^{-1/2} x`` of matrices ``x [L, n, R, d]`` by the symmetric root, which turns noise into draws."""
        U, Q = self.small_vectors.unsqueeze(1), self.long_vectors.unsqueeze(1)
        shrinkage = -torch.expm1(-0.5 * torch.log1p(self.eigenvalues / precision))  # 1 − (1 + s c / τ)^{-1/2}
        change = U @ (shrinkage.unsqueeze(1) * (U.mT @ (x @ Q))) @ Q.mT
        return (x - change) / precision.sqrt()

    def inverse_grams(self, x: Tensor, precisions: Tensor) -> Tensor:
        """``x Λ⁻¹ xᵀ`` summed over the layers, ``[k, N, O, O]``, at ``k`` values of ``τ``, for ``x [L, N, O, R, d]`` as rows.

        In the kept directions ``Λ`` is ``s c + τ`` and in all others ``τ``. Both parts are sums of squares, so no variance can be
        negative, and the long dimension is traversed once for all ``τ``.
        """
        within = x @ self.long_vectors[:, None, None]
        rest = x - within @ self.long_vectors.mT[:, None, None]
        coordinates = _widened(self.small_vectors.mT[:, None, None] @ within)
        outside = _grams(_widened(rest))
        weights = 1.0 / (_widened(self.eigenvalues) + precisions.to(coordinates).view(-1, 1, 1, 1))
        inside = [_grams(coordinates, weight) for weight in weights]
        return torch.stack([outside / tau + part for tau, part in zip(precisions.to(outside), inside, strict=True)])


def _widened(x: Tensor) -> Tensor:
    """Cast to float64, except on Apple's devices, which lack it: a covariance of log-probabilities is singular, and its
    root in float32 has only three digits."""
    return x if x.device.type == "mps" else x.double()


def _grams(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Products ``[N, O, O]`` of rows ``x [L, N, O, R, d]``, each entry weighted if weights ``[L, R, d]`` are given."""
    weighted = x if weights is None else x * weights[:, None, None]
    return torch.einsum("lnop,lnqp->noq", weighted.flatten(3), x.flatten(3))


def spectrum(small: Tensor, long: Tensor, rank: int) -> Spectrum:
    """The ``rank`` largest directions of ``S ⊗ C``, given ``S [L, R, R]`` and a root of ``C = W Wᵀ`` as ``W [L, d, m]``."""
    values, U = eigh(small)
    Q, roots, _ = svd(long)
    missing = max(rank - roots.shape[-1], 0)
    return Spectrum(
        small_vectors=U,
        small_values=values.clamp(min=0.0),  # S is a sum of squares: negative values are rounding errors
        long_vectors=F.pad(Q[..., :rank], (0, missing)),
        long_values=F.pad(roots[..., :rank].square(), (0, missing)),
    )
