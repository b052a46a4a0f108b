"""A calibrated confidence from several features of an answer: logistic regression with a Gaussian prior (Platt scaling).

Features are standardised. The first one leads: its prior is wide. How far the others may count is chosen by cross-validation,
because a few hundred answers seldom say more than that. As in Platt's method the targets are not 0 and 1 but ``1/(n₋ + 2)`` and
``(n₊ + 1)/(n₊ + 2)``, so that few answers, or answers that are all right, do not make it certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.errors import InputError
from bayeslora.number_checks import is_number

RIDGE = 1.0
"""Precision of the prior on the weight of the first standardised feature."""

RIDGES = (1.0, 10.0, 100.0, 1000.0)
"""Precisions to choose from for the weights of the others."""

FOLDS = 10

STEPS = 100
"""Most Newton steps; a handful suffices."""


@dataclass(frozen=True)
class ConfidenceModel:
    """A logistic regression.

    Attributes:
        features: names of the inputs.
        means: of the inputs, where they were fitted.
        scales: their standard deviations there.
        weights: of the standardised inputs.
        bias: log-odds at the mean of all.
    """

    features: tuple[str, ...]
    means: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float

    def __post_init__(self) -> None:
        for name in ("means", "scales", "weights"):
            values = getattr(self, name)
            if len(values) != len(self.features) or not all(map(is_number, values)):
                raise InputError(
                    f"{name} is {values!r}; give {len(self.features)} finite numbers, one for each feature"
                )
        if not all(scale > 0 for scale in self.scales):
            raise InputError(f"scales is {self.scales!r}; give numbers above 0")
        if not is_number(self.bias):
            raise InputError(f"bias is {self.bias!r}; give a finite number")

    def apply(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Confidence ``[N]`` of answers with features ``[N, F]``."""
        x = (np.asarray(rows, dtype=np.float64) - self.means) / self.scales
        return _sigmoid(x @ np.asarray(self.weights) + self.bias)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ConfidenceModel:
        """Restore from :meth:`to_dict`."""
        if not isinstance(values, Mapping) or set(values) != set(cls.__dataclass_fields__):
            raise InputError(f"confidence is {values!r}; give {', '.join(cls.__dataclass_fields__)}")
        lists = {name: values[name] for name in ("features", "means", "scales", "weights")}
        for name, value in lists.items():
            if not isinstance(value, (list, tuple)):
                raise InputError(f"{name} is {value!r}; give a list")
        return cls(**{name: tuple(value) for name, value in lists.items()}, bias=values["bias"])


def fit_confidence(
    features: Sequence[str], rows: ArrayLike, right: ArrayLike, ridge: float | None = None
) -> ConfidenceModel:
    """Fit the confidence of answers with features ``[N, F]``, of which ``right [N]`` are right.

    ``ridge`` is the precision of the prior on the weights after the first; by default cross-validation chooses it.
    """
    x, y = np.asarray(rows, dtype=np.float64), np.asarray(right, dtype=bool)
    if x.shape != (len(y), len(features)) or len(y) == 0:
        raise InputError(
            f"there are {len(y)} answers with features {x.shape}; give one row of {len(features)} for each"
        )
    if ridge is None and len(features) == 1:
        ridge = RIDGE
    if ridge is None:
        ridge = min(RIDGES, key=lambda it: (_cross_validated_loss(features, x, y, it), -it))
    return _fit(features, x, y, ridge)


def _cross_validated_loss(features: Sequence[str], x: NDArray[np.float64], y: NDArray[np.bool_], ridge: float) -> float:
    """Mean logarithmic loss of answers that were left out of the fit, rounded so that ties are broken alike everywhere."""
    folds = np.random.default_rng(0).permutation(len(y)) % min(FOLDS, len(y))
    if len(y) < 2:
        return 0.0
    losses = np.empty(len(y))
    for fold in range(folds.max() + 1):
        out = folds == fold
        p = _fit(features, x[~out], y[~out], ridge).apply(x[out])
        losses[out] = -np.log(np.clip(np.where(y[out], p, 1.0 - p), 1e-12, None))
    return round(float(losses.mean()), 9)


def _fit(features: Sequence[str], x: NDArray[np.float64], y: NDArray[np.bool_], ridge: float) -> ConfidenceModel:
    means, scales = x.mean(axis=0), x.std(axis=0)
    scales = np.where(scales > 1e-12, scales, 1.0)
    standard = np.hstack([(x - means) / scales, np.ones((len(x), 1))])
    positives = int(y.sum())
    target = np.where(y, (positives + 1) / (positives + 2), 1 / (len(y) - positives + 2))
    prior = np.diag([RIDGE, *[ridge] * (len(features) - 1), 1e-9])
    beta = np.zeros(len(features) + 1)
    for _ in range(STEPS):
        p = _sigmoid(standard @ beta)
        slope = standard.T @ (p - target) + prior @ beta
        step = np.linalg.solve((standard * (p * (1 - p))[:, None]).T @ standard + prior, slope)
        beta -= step / max(1.0, float(np.abs(step).max()) / 5.0)
        if np.abs(step).max() < 1e-10:
            break
    return ConfidenceModel(
        tuple(features), tuple(means.tolist()), tuple(scales.tolist()), tuple(beta[:-1].tolist()), float(beta[-1])
    )


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)), dtype=np.float64)
