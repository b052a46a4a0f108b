"""Split-conformal prediction sets: sets of options that contain the right one at a chosen rate.

The score of an option is ``1 − p``. On ``n`` calibration rows the threshold is the ``⌈(n+1) · level⌉``-th
smallest score of the labels, and a set holds every option that scores at most that. If calibration and
test rows are exchangeable, the label of a new row is in its set with probability of at least ``level``,
however bad the model is; a bad model pays with large sets.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from bayeslora.metrics.scores import label_probability
from bayeslora.metrics.validation import (
    BoolArray,
    FloatArray,
    ceil_product,
    check_classification,
    check_labels,
    check_open_share,
    check_present,
    check_probabilities,
    read_array,
)


def conformal_threshold(probs: ArrayLike, labels: ArrayLike, level: float = 0.9) -> float:
    """Largest score ``1 − p`` that an option of a prediction set may have, from calibration rows.

    Infinite, which makes every set the full one, if there are fewer than ``level / (1 − level)`` rows: no
    smaller sets could guarantee the level.
    """
    p, y = check_classification(probs, labels)
    rank = ceil_product(check_open_share(level, "level"), len(y) + 1)
    if rank > len(y):
        return math.inf
    return float(np.sort(_score(label_probability(p, y)))[rank - 1])


def conformal_sets(probs: ArrayLike, threshold: float, present: ArrayLike | None = None) -> BoolArray:
    """Which options are in each row's prediction set, boolean ``[N, C]``.

    Args:
        probs: ``[N, C]``.
        threshold: from :func:`conformal_threshold` on other rows.
        present: boolean ``[N, C]``, which options a row offers; absent ones are never in a set. Without
            it every column is an option. That matters only for a threshold of 1 or more, which lets
            options with probability 0 in: they may be right, and leaving them out would break the
            guarantee.
    """
    if math.isnan(threshold):
        raise ValueError("threshold must be a number, got nan")
    p = check_probabilities(probs)
    return (_score(p) <= threshold) & check_present(present, p)


def set_coverage(sets: ArrayLike, labels: ArrayLike) -> float:
    """Share of rows whose label is in its set."""
    members = _check_sets(sets)
    y = check_labels(labels, members)
    return float(np.mean(members[np.arange(len(y)), y]))


def mean_set_size(sets: ArrayLike) -> float:
    """Mean number of options in a set."""
    return float(_check_sets(sets).sum(axis=-1).mean())


def _score(p: FloatArray) -> FloatArray:
    """Score in float64, so that float32 and float64 rows are compared with the same threshold."""
    return 1.0 - p.astype(np.float64)


def _check_sets(sets: ArrayLike) -> BoolArray:
    members = read_array(sets, "sets")
    if members.ndim != 2 or members.dtype.kind != "b" or members.size == 0:
        raise ValueError(
            f"sets must be booleans [N, C], not empty, got shape {members.shape} and dtype {members.dtype}"
        )
    return members
