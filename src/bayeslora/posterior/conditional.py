"""A factor given its inducing matrix: mean and exact noise (methods entry 13, sections 13.1 and 13.3).

With the projectors ``P`` and ``C`` of both sides (see :mod:`bayeslora.posterior.projection`) and a
whitened inducing matrix ``V [m_r, m_c]``, the standardised factor ``X [o_F, i_F]`` has

    E[X | V] = P_rᵀ V P_c,      Cov(vec X | V) = Σ_X = I − (P_rᵀ P_r) ⊗ (P_cᵀ P_c)

with row-major ``vec``. Shapes: ``V [L, n, m_r, m_c]``, ``X [L, n, o_F, i_F]``; here ``P_r`` is ``[m_r, o_F]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayeslora.posterior.projection import Projection

Noise = Callable[[Sequence[int]], Tensor]
"""Supplies standard normal numbers of a given shape."""


def conditional_mean(row: Projection, col: Projection, core: Tensor) -> Tensor:
    """``P_rᵀ V P_c`` for every layer and draw."""
    if _is_tall(row, col):
        return conditional_mean(col, row, core.mT).mT
    left = row.p.mT.unsqueeze(1) @ core
    return _right_multiply(left, col.p)


def conditional_sample(row: Projection, col: Projection, core: Tensor, noise_scale: Tensor, noise: Noise) -> Tensor:
    """A draw of ``X ~ N(P_rᵀ V P_c, λ² Σ_X)``, with ``λ = noise_scale [L, 1, 1, 1]``.

    Matheron's rule: take prior samples of ``X`` (``E₁``) and of its inducing matrix, and subtract the conditional mean of
    the second from the first,

        noise = E₁ − P_rᵀ (P_r E₁ P_cᵀ + ξ) P_c,      ξ = C_r E₂ + P_r E₃ C_cᵀ.

    This needs no factor of ``Z Zᵀ``, which is singular when there are more inducing rows than rows. A tall factor is
    treated as a transposed wide one, so that ``E₃ [o_F, m_c]`` stays small; the short side is multiplied last.
    """
    if _is_tall(row, col):
        return conditional_sample(col, row, core.mT, noise_scale, noise).mT
    layers, n, m_r, m_c = core.shape
    rows, columns = row.p.shape[-1], col.p.shape[-1]
    e1 = noise((layers, n, rows, columns))
    e2 = noise((layers, n, m_r, m_c))
    e3 = noise((layers, n, rows, m_c))
    short_side = _right_multiply(e1, col.p.mT) + _right_multiply(e3, col.c.mT)
    prior_core = row.p.unsqueeze(1) @ short_side + row.c.unsqueeze(1) @ e2
    left = row.p.mT.unsqueeze(1) @ (core - noise_scale * prior_core)
    return _right_multiply(left, col.p, add=noise_scale * e1)


def _is_tall(row: Projection, col: Projection) -> bool:
    return row.p.shape[-1] > col.p.shape[-1]


def _right_multiply(x: Tensor, matrix: Tensor, add: Tensor | None = None) -> Tensor:
    """``x [L, n, a, b] @ matrix [L, b, c] (+ add)``, with the draws folded into rows: no copy per draw."""
    folded = x.flatten(1, 2)
    product = torch.bmm(folded, matrix) if add is None else torch.baddbmm(add.flatten(1, 2), folded, matrix)
    return product.unflatten(1, x.shape[1:3])
