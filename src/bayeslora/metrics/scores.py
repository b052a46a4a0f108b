"""Accuracy and the two proper scores: log-loss and Brier.

A proper score is best in expectation when the probabilities are the true ones, so unlike the calibration
error it cannot be gamed by predicting the base rate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.validation import BoolArray, FloatArray, IntArray, check_classification


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """Share of rows whose most probable class is the label; of equal ones the first is taken."""
    p, y = check_classification(probs, labels)
    return float(top_class(p, y)[1].mean())


def nll(probs: ArrayLike, labels: ArrayLike) -> float:
    """``−mean log p_y`` in nats. A label with probability 0 makes it infinite; it is not clipped."""
    p, y = check_classification(probs, labels)
    return mean_nll(label_probability(p, y))


def brier(probs: ArrayLike, labels: ArrayLike) -> float:
    """``mean Σ_c (p_c − 1[y = c])²``, from 0 to 2."""
    p, y = check_classification(probs, labels)
    return float(squared_error(p, y).mean())


def top_class(probs: FloatArray, labels: IntArray) -> tuple[FloatArray, BoolArray]:
    """Confidence ``max_c p_c`` of every row and whether that class is the label, of checked input."""
    return probs.max(axis=-1), probs.argmax(axis=-1) == labels


def label_probability(probs: FloatArray, labels: IntArray) -> FloatArray:
    """``p_y`` of every row, of checked input."""
    return probs[np.arange(len(labels)), labels]


def mean_nll(label_probability: FloatArray) -> float:
    """``−mean log p_y`` from the labels' probabilities."""
    with np.errstate(divide="ignore"):
        return float(0.0 - np.log(label_probability.astype(np.float64)).mean())


def squared_error(probs: FloatArray, labels: IntArray) -> NDArray[np.float64]:
    """``Σ_c (p_c − 1[y = c])²`` of every row, of checked input."""
    error = probs.astype(np.float64)
    error[np.arange(len(labels)), labels] -= 1.0
    return np.asarray(np.einsum("nc,nc->n", error, error))
