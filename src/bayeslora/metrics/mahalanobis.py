"""How far feature vectors lie from those that a Gaussian was fitted to: the Mahalanobis distance.

Features of language models need care: a few coordinates are hundreds of times as large as the rest, and there are often
more coordinates than vectors to fit to. So each coordinate is divided by its standard deviation first, and the covariance
``S`` of the result, which is a correlation matrix, is shrunk towards the identity by

    ρ = min(1, Σᵢ ‖zᵢ zᵢᵀ − S‖² / (n² ‖S − I‖²)),    Σ = (1 − ρ) S + ρ I,

the estimate of the weight of least squared error by O. Ledoit and M. Wolf, "A well-conditioned estimator for
large-dimensional covariance matrices", Journal of Multivariate Analysis 88 (2004). It assumes no distribution.

The distance is the plain one. The relative form subtracts the distance from a background of other data, which a run on its
own task does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.validation import real_array, refuse

LEAST_SHRINKAGE = 1e-3
"""Keeps the covariance invertible where features do not vary in all directions."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FeatureGaussian:
    """A Gaussian over features of dimension ``d``, by ``r`` principal directions of the standardised features.

    Attributes:
        mean: ``[d]``.
        scale: ``[d]``, standard deviation of each coordinate; 1 where it is constant.
        directions: ``[r, d]``, orthonormal rows; ``r`` is the smaller of ``d`` and the number of vectors.
        variances: ``[r]``, variances along them, before shrinkage.
        shrinkage: weight of the identity in the covariance.
    """

    mean: Floats
    scale: Floats
    directions: Floats
    variances: Floats
    shrinkage: float

    def __post_init__(self) -> None:
        width, rank = self.mean.size, self.variances.size
        shapes = {"mean": (width,), "scale": (width,), "directions": (rank, width), "variances": (rank,)}
        for name, shape in shapes.items():
            values = getattr(self, name)
            if values.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got shape {values.shape}")
            refuse(~np.isfinite(values), values, f"{name} must be finite")
        refuse(self.scale <= 0, self.scale, "scale must be above 0")
        refuse(self.variances < 0, self.variances, "variances must not be negative")
        if not 0 < self.shrinkage <= 1:
            raise ValueError(f"shrinkage must be above 0 and at most 1, got {self.shrinkage}")

    def distances(self, features: ArrayLike) -> Floats:
        """Mahalanobis distances ``[N]`` of features ``[N, d]`` from the mean.

        In the directions that the fit has not seen the variance is the shrinkage alone.
        """
        x = _check_features(features)
        if x.shape[1] != self.mean.size:
            raise ValueError(f"features must have {self.mean.size} columns, got {x.shape[1]}")
        z = (x - self.mean) / self.scale
        along = np.square(z @ self.directions.T)
        seen = (along / ((1 - self.shrinkage) * self.variances + self.shrinkage)).sum(axis=1)
        unseen = np.maximum(np.square(z).sum(axis=1) - along.sum(axis=1), 0.0) / self.shrinkage
        return np.asarray(np.sqrt(seen + unseen))


def fit_gaussian(features: ArrayLike) -> FeatureGaussian:
    """Fit mean and shrunk covariance to features ``[n, d]`` of at least two vectors."""
    x = _check_features(features)
    if len(x) < 2:
        raise ValueError(f"features must have at least two rows, got {len(x)}")
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale <= len(x) * np.finfo(np.float64).eps * np.abs(x).max(axis=0)] = 1.0  # constant, up to round-off
    z = (x - mean) / scale
    _, singular, directions = np.linalg.svd(z, full_matrices=False)
    variances = np.square(singular) / len(z)
    return FeatureGaussian(mean, scale, directions, variances, _shrinkage(z, variances))


def _shrinkage(z: Floats, variances: Floats) -> float:
    """The weight of the identity, from the standardised features and the eigenvalues of their covariance."""
    n, width = z.shape
    squared = np.square(variances).sum()  # ‖S‖²
    error = (np.square(np.square(z).sum(axis=1)).sum() / n - squared) / n  # Σ ‖z zᵀ − S‖² / n²
    apart = squared - 2 * variances.sum() + width  # ‖S − I‖²
    return float(np.clip(error / apart, LEAST_SHRINKAGE, 1.0)) if apart > 0 else 1.0


def _check_features(features: ArrayLike) -> Floats:
    x = real_array(features, "features").astype(np.float64)
    if x.ndim != 2 or x.size == 0:
        raise ValueError(f"features must have shape [N, d] with at least one row and column, got shape {x.shape}")
    refuse(~np.isfinite(x), x, "features must be finite")
    return x
