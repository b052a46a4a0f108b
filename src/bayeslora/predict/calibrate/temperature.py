"""Temperature scaling of probabilities averaged over draws.

Example:
    >>> log_p = np.log([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])  # right in two of three, yet 90 % sure
    >>> temperature = fit_temperature(log_p, [0, 0, 1])
    >>> round(temperature, 2), np.exp(apply_temperature(log_p, temperature)).round(2)[0].tolist()
    (3.17, [0.67, 0.33])
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.errors import InputError
from bayeslora.metrics.validation import IntArray, check_labels, real_array, refuse
from bayeslora.number_checks import check_number

LogProbabilities = NDArray[np.float64]

TEMPERATURES = (0.05, 20.0)
"""Bounds of the temperature: data may ask for zero (every answer right) or infinity."""

PRIOR_SD = math.log(2.0)
"""Prior standard deviation of ``log T`` for calibration: a factor of two either way is not unusual. The prior dominates for a
few questions, and is negligible for hundreds."""

_GRID = 241
"""Grid points for the NLL with a prior, which may have more than one minimum."""

_HALVINGS = 50
"""Bisection steps, which narrow the range of ``log T`` to 5e-15."""


def fit_temperature(log_probabilities: ArrayLike, labels: ArrayLike, prior_sd: float = math.inf) -> float:
    """Fit the temperature ``T`` in :data:`TEMPERATURES` of least mean NLL of ``softmax(log p / T)``.

    With a ``prior_sd`` it is that of least ``Σ NLL + ½ (log T / sd)²``: the most probable one if ``log T ~ N(0, sd²)``.

    The NLL is convex in ``β = 1/T`` and its slope is ``mean(E_β[log p] − log p_y)``: its only change of sign
    is found by bisection. A result at either bound means that the data do not determine it: a few questions that are all
    answered correctly favour certainty, answers worse than guessing the opposite. If no temperature changes anything (one
    option each, or all equal), it is 1.
    """
    centred, y = checked(log_probabilities, labels)
    if not np.any(np.isfinite(centred) & (centred < 0)):
        return 1.0
    least, greatest = TEMPERATURES
    if math.isfinite(prior_sd):
        return _most_probable(centred, y, prior_sd)
    if _slope(centred, y, 1 / least) <= 0:
        return least
    if _slope(centred, y, 1 / greatest) >= 0:
        return greatest
    return _bisect(lambda temperature: _slope(centred, y, 1 / temperature) > 0, least, greatest)


def apply_temperature(log_probabilities: ArrayLike, temperature: float) -> LogProbabilities:
    """``log softmax(log p / T)`` over the options present; the order of the options is unchanged."""
    check_number("temperature", temperature, above=0)
    return normalised(_centred(log_probabilities, "log_probabilities") / temperature)


def _most_probable(centred: LogProbabilities, labels: IntArray, prior_sd: float) -> float:
    check_number("prior_sd", prior_sd, above=0)
    rows = np.arange(len(labels))

    def loss(log_t: float) -> float:
        nll = -normalised(centred / math.exp(log_t))[rows, labels].sum()
        return float(nll + 0.5 * (log_t / prior_sd) ** 2)

    def too_cold(temperature: float) -> bool:
        beta = 1.0 / temperature
        return math.log(temperature) / prior_sd**2 < len(labels) * beta * _slope(centred, labels, beta)

    grid = np.linspace(math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1]), _GRID)
    best = int(np.argmin([loss(log_t) for log_t in grid]))
    return _bisect(too_cold, math.exp(grid[max(best - 1, 0)]), math.exp(grid[min(best + 1, _GRID - 1)]))


def _bisect(too_cold: Callable[[float], bool], low: float, high: float) -> float:
    """Find where ``too_cold`` turns from true to false by bisection on a log scale."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if too_cold(middle) else (low, middle)
    return math.sqrt(low * high)


def _slope(centred: LogProbabilities, labels: IntArray, inverse_temperature: float) -> float:
    """Derivative of the mean NLL by ``β = 1/T``, of checked input."""
    probabilities = np.exp(normalised(inverse_temperature * centred))
    present = np.isfinite(centred)
    expected = np.sum(probabilities * np.where(present, centred, 0.0), axis=-1)
    return float(np.mean(expected - centred[np.arange(len(labels)), labels]))


def normalised(centred: LogProbabilities) -> LogProbabilities:
    """Rows whose probabilities sum to 1, from rows whose maximum is 0."""
    return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))


def checked(
    log_probabilities: ArrayLike, labels: ArrayLike, name: str = "log_probabilities"
) -> tuple[LogProbabilities, IntArray]:
    """Centred rows, and labels that are present."""
    centred = _centred(log_probabilities, name)
    y = check_labels(labels, centred)
    absent = np.flatnonzero(np.isneginf(centred[np.arange(len(y)), y]))
    if len(absent):
        row = int(absent[0])
        raise InputError(
            f"{name}: the right option, {y[row]}, of row {row} has probability 0 ({len(absent)} such rows), which is what "
            "an option looks like that the question does not have; correct the labels or leave these rows out"
        )
    return centred, y


def _centred(log_probabilities: ArrayLike, name: str) -> LogProbabilities:
    """Rows in float64 shifted to a maximum of 0, so that ``exp`` cannot overflow."""
    log_p = real_array(log_probabilities, name).astype(np.float64)
    if log_p.ndim != 2 or log_p.size == 0:
        raise InputError(f"{name} has shape {log_p.shape}; give [N, O], at least one row and one option")
    refuse(np.isnan(log_p) | np.isposinf(log_p), log_p, f"{name} must be finite, or -inf where there is no option")
    highest = log_p.max(axis=-1, keepdims=True)
    refuse(np.isneginf(highest[:, 0]), highest[:, 0], f"{name} must have an option in every row", what="maximum")
    return log_p - highest
