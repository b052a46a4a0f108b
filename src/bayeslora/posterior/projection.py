"""Projectors between a factor and its inducing matrix (methods entry 13, section 13.1).

One side of a factor (its rows or its columns) of width ``w`` has ``m`` inducing points ``Z [m, w]`` and
a positive diagonal ``D [m]``. With ``K = Z Zᵀ + D² = 𝓛 𝓛ᵀ`` everything needed is one triangular solve,

    [P, C] = 𝓛⁻¹ [Z, D]        and        P Pᵀ + C Cᵀ = I,

so no inverse is formed and the noise needs no second Cholesky factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BASE_JITTER = 1e-6
"""Jitter that is always added to ``D²``, relative to the mean of ``diag(Z Zᵀ)``."""

ASYNCHRONOUS = ("cuda", "meta")
"""Devices on which the host should not read a result in every step: their queue would run empty, or there is no result."""

MAX_JITTER = 1e-2
"""Largest relative jitter that is tried before giving up."""


class JitterWarning(UserWarning):
    """A kernel matrix was close to singular and needed more than the usual jitter."""


class IllConditionedError(ArithmeticError):
    """A kernel matrix has no Cholesky factor with any of the jitters tried."""


class Side(NamedTuple):
    """Inducing points ``z [L, m, w]`` and diagonal ``d [L, m]`` of one side of stacked factors."""

    z: Tensor
    d: Tensor


class Projection(NamedTuple):
    """``p = 𝓛⁻¹Z [L, m, w]``, ``c = 𝓛⁻¹D [L, m, m]`` and ``chol = 𝓛 [L, m, m]``."""

    p: Tensor
    c: Tensor
    chol: Tensor


def project(sides: Sequence[Side], jitter: float | None = None) -> list[Projection]:
    """Projectors of all sides; sides of equal ``m`` share one batched Cholesky call.

    With ``D`` and ``jitter`` almost zero, the rows of ``P`` are orthonormal.
    """
    jitter = BASE_JITTER if jitter is None else jitter
    by_size: dict[int, list[int]] = {}
    for index, side in enumerate(sides):
        by_size.setdefault(side.z.shape[-2], []).append(index)
    projections: dict[int, Projection] = {}
    for members in by_size.values():
        stacked_d, stacked_chol = _factorise([sides[k] for k in members], jitter)
        counts = [sides[k].z.shape[0] for k in members]
        pieces = zip(members, stacked_d.split(counts), stacked_chol.split(counts), strict=True)
        for index, d, chol in pieces:
            projections[index] = _solve(chol, sides[index].z, d)
    return [projections[index] for index in range(len(sides))]


def _factorise(sides: Sequence[Side], base_jitter: float) -> tuple[Tensor, Tensor]:
    """``D`` with the jitter folded in, and the Cholesky factor of ``Z Zᵀ + D²``, both stacked.

    The kernel squares the condition of ``Z``, and a random square ``Z`` can be close to singular: in float32 the projectors
    would be off by about 1e-3. So these small matrices are formed and factorised in float64 where the device has it.

    The jitter is part of ``D²``, so that the kernel and the conditional noise stay consistent. Failed matrices are retried
    with ten times the jitter; the others are kept. In float64 the first jitter is far above any rounding error, so only
    non-finite matrices fail. They become NaN where a check would make the host wait for the device.
    """
    dtype = sides[0].z.dtype
    precise = dtype if sides[0].z.device.type == "mps" else torch.float64
    gram = torch.cat([_gram(side.z.to(precise)) for side in sides])
    d2 = torch.cat([side.d for side in sides]).to(precise).square()
    unit = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    jitter = torch.full_like(unit, base_jitter)
    while True:
        jittered = d2 + jitter * unit
        chol, info = torch.linalg.cholesky_ex(gram + torch.diag_embed(jittered))
        diagonal = chol.diagonal(dim1=-2, dim2=-1)
        failed = info.ne(0) | ~torch.isfinite(diagonal.sum(-1))  # NaN passes LAPACK unnoticed
        if gram.device.type in ASYNCHRONOUS and precise == torch.float64:
            chol = chol.masked_fill(failed[:, None, None], torch.nan)
            return jittered.sqrt().to(dtype), chol.to(dtype)
        if not bool(failed.any()):
            return jittered.sqrt().to(dtype), chol.to(dtype)
        finite = torch.isfinite(gram).all() & torch.isfinite(d2).all()
        _report_failure(failed, jitter[failed].max(), finite=bool(finite))
        jitter = torch.where(failed[:, None], 10.0 * jitter, jitter)


def _gram(z: Tensor) -> Tensor:
    return z @ z.mT


def _report_failure(failed: Tensor, jitter: Tensor, *, finite: bool) -> None:
    """Warn while larger jitters are left to try, else raise."""
    count, total, used = int(failed.sum()), failed.numel(), float(jitter)
    if not finite:
        raise IllConditionedError(
            f"{count} of {total} kernel matrices Z Zᵀ + D² are not finite; training has diverged: "
            "lower the learning rate or resume from an earlier checkpoint"
        )
    if used > 0.99 * MAX_JITTER:  # repeated products are not quite powers of ten
        raise IllConditionedError(
            f"{count} of {total} kernel matrices Z Zᵀ + D² have no Cholesky factor even with a relative "
            f"jitter of {used:.0e}: the inducing points have collapsed; lower the learning rate or use "
            "fewer inducing rows and columns"
        )
    warnings.warn(
        f"{count} of {total} kernel matrices Z Zᵀ + D² have no Cholesky factor with a relative jitter of "
        f"{used:.0e}; trying {10 * used:.0e}",
        JitterWarning,
        stacklevel=2,
    )


def _solve(chol: Tensor, z: Tensor, d: Tensor) -> Projection:
    """One triangular solve of ``[Z, D]``."""
    width = z.shape[-1]
    solved = torch.linalg.solve_triangular(chol, torch.cat([z, torch.diag_embed(d)], dim=-1), upper=False)
    return Projection(solved[..., :width], solved[..., width:], chol)
