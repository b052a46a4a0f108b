"""A test problem with a known constrained front: three quadratic objectives and a half-space constraint.

Objective ``m`` is the squared distance to its own best point ``a_m``. Any weighted sum of the three is, up to a constant,
the squared distance to the weighted mean of the ``a_m``. So the best points without a constraint are the triangle between
them, and with one they are the triangle projected onto the feasible half-space, ``n·x ≤ b``. Coordinates beyond the first
two have one best value for all objectives, which a search has to find.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from bayeslora.tuning.front import Floats, hypervolume, reference_point

BEST = np.array([[0.1, 0.6], [0.5, 0.35], [0.7, 0.2]])
NORMAL, BOUND = np.array([1.0, 1.0]) / np.sqrt(2.0), 0.62
OTHER = 0.5


class ThreeBowls:
    """The problem in the unit cube of some dimension, of at least two."""

    def __init__(self, dimension: int = 3) -> None:
        self.dimension = dimension

    def objectives(self, x: Floats) -> Floats:
        """``[N, 3]``, to be minimised, for points ``[N, D]``."""
        others = ((x[:, 2:] - OTHER) ** 2).sum(1, keepdims=True)
        return np.asarray(((x[:, None, :2] - BEST) ** 2).sum(-1) + others)

    def constraint(self, x: Floats) -> Floats:
        """``[N, 1]``, at most zero on the feasible side; not linear in ``x``."""
        return np.asarray(np.sinh(2.0 * (x[:, :2] @ NORMAL - BOUND)))[:, None]

    def best_points(self, steps: int = 80) -> Floats:
        """Points of the exact Pareto set, from weights on a grid of ``steps`` steps."""
        grid = np.array([(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)])
        means = grid / steps @ BEST
        feasible = means - np.maximum(means @ NORMAL - BOUND, 0.0)[:, None] * NORMAL
        return np.hstack([feasible, np.full((len(feasible), self.dimension - 2), OTHER)])

    @cached_property
    def front(self) -> Floats:
        """Objectives of the exact Pareto set."""
        return self.objectives(self.best_points())

    @cached_property
    def reference(self) -> Floats:
        """Reference point of the hypervolumes."""
        return reference_point(self.front)

    @cached_property
    def optimum(self) -> float:
        """Hypervolume of the front."""
        return hypervolume(self.front, self.reference)

    def score(self, x: Floats) -> float:
        """Hypervolume of the feasible points, as a share of the optimum."""
        feasible = self.constraint(x)[:, 0] <= 0
        return hypervolume(self.objectives(x)[feasible], self.reference) / self.optimum
