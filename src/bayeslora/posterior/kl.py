"""The KL of the objective: named terms, their closed forms and their weight in the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

KLScaling = Literal["elbo", "paper", "blob"]

PAPER_KL_FACTOR = 0.2


@dataclass(frozen=True)
class KL:
    """KL of the posterior to its prior in nats, summed over all layers; no terms for points, which have no prior.

    Most posteriors have one term, ``factors``. Those with inducing matrices have two: ``inducing`` belongs to the matrix of each
    factor, ``conditional`` to the noise of the factors given that matrix. They are kept apart because the second is larger
    by orders of magnitude and says nothing about the fit. A free mean adds a third, ``mean``.

    Attributes:
        terms: by their names.
    """

    terms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """Sum of the terms, which enters the loss."""
        return reduce(torch.add, self.terms.values()) if self.terms else torch.zeros(())

    @property
    def learnt(self) -> Tensor:
        """Sum of the terms that training can change: with the same gradient as the total, but without constants that would
        hide the rest of a loss in a log."""
        found = [term for term in self.terms.values() if term.requires_grad]
        return reduce(torch.add, found) if found else torch.zeros_like(self.total)

    def __getitem__(self, name: str) -> Tensor:
        return self.terms[name]

    def __add__(self, other: KL) -> KL:
        """Term by term."""
        mine, theirs = dict(self.terms), dict(other.terms)
        return KL(
            {name: reduce(torch.add, (it[name] for it in (mine, theirs) if name in it)) for name in mine | theirs}
        )


def kl_weight(scaling: KLScaling, *, examples: int, batch_size: int, beta: float = 1.0, step: int = 0) -> float:
    """Weight of the KL beside a *mean* log-likelihood (methods entry 13, section 13.4).

    ``elbo`` is ``beta / N``, the bound per example. ``paper`` is ``0.2 / steps per epoch``, which
    equals ``0.2 b / N`` and so weighs the KL by ``0.2 b`` relative to the bound. ``blob`` is ``beta π_j`` with
    ``π_j = 2^j / (2^(M+1) − 1)`` at the ``j``-th of the ``M`` steps of a cycle (card 7, :func:`blob_cycle`): the last steps
    have nearly all of it, and the sum over a cycle is about ``beta``, which weighs the KL by about the batch size
    relative to the bound.

    Args:
        scaling: which of the three.
        examples: ``N``.
        batch_size: ``b``.
        beta: multiplier.
        step: optimiser steps done before this one; only ``blob`` uses it.
    """
    if examples < 1 or batch_size < 1:
        raise ValueError(f"need examples >= 1 and batch_size >= 1, got {examples} and {batch_size}")
    if not (math.isfinite(beta) and beta >= 0):
        raise ValueError(f"beta must be finite and not negative, got {beta}")
    if scaling == "elbo":
        return beta / examples
    if scaling == "paper":
        return beta * PAPER_KL_FACTOR / math.ceil(examples / batch_size)
    if scaling == "blob":
        cycle = blob_cycle(examples, batch_size)
        j = step % cycle + 1
        return beta * 2.0 ** (j - cycle - 1) / (1.0 - 2.0 ** -(cycle + 1))
    raise ValueError(f"unknown KL scaling {scaling!r}; choose one of {', '.join(get_args(KLScaling))}")


def blob_cycle(examples: int, batch_size: int) -> int:
    """Steps ``M = ⌊100 N^(π/8) / b⌋`` of a cycle of BLoB's KL weights, as its authors' code has it (card 7): no epoch."""
    return max(1, math.floor(100 * examples ** (math.pi / 8) / batch_size))


def gaussian_kl(mean: Tensor, sd: Tensor, prior_sd: float) -> Tensor:
    """``KL(N(mean, diag sd²) ‖ N(0, prior_sd² I))``, summed over every entry (methods entries 6 and 7)."""
    return standard_normal_kl(mean / prior_sd, sd / prior_sd)


def standard_normal_kl(mean: Tensor, sd: Tensor) -> Tensor:
    """``KL(N(mean, diag sd²) ‖ N(0, I))``, summed over every entry."""
    return 0.5 * (sd.square() + mean.square() - 1.0 - 2.0 * sd.log()).sum()


def standard_normal_energy(value: Tensor) -> Tensor:
    """``−log N(value; 0, I)`` of draws ``[M, n, ...]``, averaged over ``n`` and summed over the rest."""
    energy = 0.5 * (value.square() + math.log(2.0 * math.pi))
    return energy.mean(1).sum()


def gaussian_entropy(sd: Tensor) -> Tensor:
    """Entropy of independent Gaussians, summed over every entry."""
    return (sd.log() + 0.5 * math.log(2.0 * math.pi * math.e)).sum()


def matrix_normal_kl(mean: Tensor, sd: Tensor, chol_row: Tensor, chol_col: Tensor) -> Tensor:
    """``KL(N(mean, diag sd²) ‖ N(0, K_r ⊗ K_c))`` of matrices ``[L, m_r, m_c]``, from the kernels' Cholesky factors.

    The trace needs only the diagonals of the inverse kernels: ``Σ_ij (K_r⁻¹)_ii sd_ij² (K_c⁻¹)_jj``.
    """
    inverse_row, inverse_col = (_triangular_inverse(chol) for chol in (chol_row, chol_col))
    diagonal_row, diagonal_col = (x.square().sum(-2) for x in (inverse_row, inverse_col))
    trace = (diagonal_row.unsqueeze(-1) * sd.square() * diagonal_col.unsqueeze(-2)).sum()
    quadratic = (inverse_row @ mean @ inverse_col.mT).square().sum()
    log_dets = half_log_det(chol_row, chol_col) - sd.log().sum()
    return 0.5 * (trace + quadratic - sd.numel()) + log_dets


def half_log_det(chol_row: Tensor, chol_col: Tensor) -> Tensor:
    """``½ log det(K_r ⊗ K_c) = m_c log det 𝓛_r + m_r log det 𝓛_c``, summed over layers."""
    row, col = (chol.diagonal(dim1=-2, dim2=-1).log() for chol in (chol_row, chol_col))
    return col.shape[-1] * row.sum() + row.shape[-1] * col.sum()


def _triangular_inverse(chol: Tensor) -> Tensor:
    identity = torch.eye(chol.shape[-1], dtype=chol.dtype, device=chol.device)
    return torch.linalg.solve_triangular(chol, identity.expand_as(chol), upper=False)


def conditional_noise_kl(noise_scale: Tensor, entries: int) -> Tensor:
    """``KL(N(μ, λ²Σ) ‖ N(μ, Σ))`` for ``entries`` dimensions: ``entries/2 (λ² − 1 − 2 ln λ)``.

    The covariance cancels, so the value depends on neither the projectors nor the inducing matrix.
    """
    return 0.5 * entries * (noise_scale.square() - 1.0 - 2.0 * torch.log(noise_scale)).sum()
