"""Pareto fronts: non-dominated points, their hypervolume, and its reference point.

All objectives are minimised. Points are rows, ``[N, M]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]

MARGIN = 0.1
"""Distance of the reference point beyond the worst values, as a share of their range."""


def non_dominated(points: ArrayLike) -> NDArray[np.bool_]:
    """``[N]``, which points are not dominated: no other is at least as good in every objective and better in one."""
    y = np.asarray(points, dtype=float)
    no_worse = (y[:, None] <= y[None]).all(-1)
    better = (y[:, None] < y[None]).any(-1)
    return np.asarray(~(no_worse & better).any(0))


def hypervolume(points: ArrayLike, reference: ArrayLike) -> float:
    """Volume that the points dominate within the box below the reference point.

    It is a sum of slices along the last objective, each as thick as the distance to the next point, times the volume that
    the points below it dominate in the other objectives.
    """
    y, r = np.asarray(points, dtype=float), np.asarray(reference, dtype=float)
    return _volume(y[(y < r).all(-1)], r)


def reference_point(points: ArrayLike) -> Floats:
    """Reference point of the hypervolume, worse than all given points in every objective.

    It lies a tenth of their range beyond the worst of each objective, since a point on the boundary would add no volume.
    """
    y = np.asarray(points, dtype=float)
    ranges = np.ptp(y, axis=0)
    return np.asarray(y.max(0) + MARGIN * np.where(ranges > 0, ranges, 1.0))


def _volume(y: Floats, reference: Floats) -> float:
    if len(y) == 0:
        return 0.0
    if y.shape[1] == 1:
        return float(reference[0] - y.min())
    if y.shape[1] == 2:
        return _area(y, reference)
    y = y[np.argsort(y[:, -1], kind="stable")]
    thickness = np.diff(np.append(y[:, -1], reference[-1]))
    return sum(
        float(thick) * _volume(y[: k + 1, :-1], reference[:-1]) for k, thick in enumerate(thickness) if thick > 0
    )


def _area(y: Floats, reference: Floats) -> float:
    """Volume in two objectives: strips along the first, each up to the best of the second so far."""
    y = y[np.argsort(y[:, 0], kind="stable")]
    widths = np.diff(np.append(y[:, 0], reference[0]))
    return float(widths @ (reference[1] - np.minimum.accumulate(y[:, 1])))
