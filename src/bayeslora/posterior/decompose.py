"""Eigenvalue and singular value decompositions that converge on every machine.

Some LAPACKs fail on matrices whose entries span many orders of magnitude: MKL's ``eigh`` in float32 does on sums of few outer
products. In float64 none did. So matrices are decomposed in float64, with a fallback where that does not converge.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOT_CONVERGED: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors of symmetric matrices ``[..., n, n]``.

    Where the solver does not converge, a shifted matrix with the same vectors is tried, and then its singular values.

    Raises:
        ArithmeticError: an entry is not finite.
    """
    exact = _widened(matrix)
    exact = 0.5 * (exact + exact.mT)
    try:
        values, vectors = torch.linalg.eigh(exact)
    except _NOT_CONVERGED:
        values, vectors = _shifted(exact)
    return _like(values, matrix), _like(vectors, matrix)


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reduced SVD ``U, d, Vᵀ`` of matrices ``[..., m, n]``, with ``d`` in descending order.

    Where the solver does not converge, the result comes from the eigenvectors of the smaller Gram matrix. Singular values below
    1e-8 of the largest are then rounding errors.

    Raises:
        ArithmeticError: an entry is not finite.
    """
    exact = _widened(matrix)
    try:
        U, d, Vh = torch.linalg.svd(exact, full_matrices=False)
    except _NOT_CONVERGED:
        U, d, Vh = _from_square(exact)
    return _like(U, matrix), _like(d, matrix), _like(Vh, matrix)


def _shifted(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Shift by a diagonal as large as the matrix: all eigenvalues then lie between 0 and twice that, well apart from 0."""
    size = torch.linalg.matrix_norm(matrix, ord=torch.inf)[..., None, None].clamp_min(torch.finfo(matrix.dtype).tiny)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    moved = matrix + size * identity
    try:
        vectors = torch.linalg.eigh(moved)[1]
    except _NOT_CONVERGED:
        vectors = torch.linalg.svd(moved)[0].flip(-1)
    return ((matrix @ vectors) * vectors).sum(-2), vectors


def _from_square(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if matrix.shape[-2] < matrix.shape[-1]:
        V, d, Uh = _from_square(matrix.mT)
        return Uh.mT, d, V.mT
    _, V = eigh(matrix.mT @ matrix)
    V = V.flip(-1)
    d = torch.linalg.vector_norm(matrix @ V, dim=-2)
    Q, R = torch.linalg.qr(matrix @ V)  # orthonormal also where the matrix has less than full rank
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(Q)
    return Q * signs.unsqueeze(-2), d, V.mT


def _widened(matrix: Tensor) -> Tensor:
    """Cast to float64, on the CPU if the device lacks it. Refuses NaN, which LAPACKs treat differently."""
    if not bool(torch.isfinite(matrix).all()):
        raise ArithmeticError("a matrix has entries that are not finite: weights or gradients are broken")
    return (matrix.cpu() if matrix.device.type == "mps" else matrix).double()


def _like(found: Tensor, matrix: Tensor) -> Tensor:
    return found.to(device=matrix.device, dtype=matrix.dtype)
