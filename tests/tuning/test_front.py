"""Fronts and volumes against BoTorch, counting, and a volume that is known."""

from __future__ import annotations

import numpy as np
import pytest

from bayeslora.tuning.front import hypervolume, non_dominated, reference_point
from bayeslora.tuning.synthetic import BEST, BOUND, NORMAL, ThreeBowls


def test_a_point_is_beaten_by_one_that_is_nowhere_worse_and_somewhere_better():
    points = [[1, 3], [2, 2], [3, 1], [2, 3], [1, 3], [4, 4]]
    assert non_dominated(points).tolist() == [True, True, True, False, True, False]
    assert non_dominated(np.empty((0, 3))).tolist() == []


@pytest.mark.parametrize("objectives", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_fronts_and_volumes_are_those_of_botorch(objectives, seed):
    hv = pytest.importorskip("botorch.utils.multi_objective.hypervolume")
    pareto = pytest.importorskip("botorch.utils.multi_objective.pareto")
    import torch

    y = np.random.default_rng(seed).random((25, objectives))
    y[:3, 0] = y[3:6, 0]  # equal values, too
    reference = np.full(objectives, 0.9)  # some points lie beyond
    assert (non_dominated(y) == pareto.is_non_dominated(torch.as_tensor(-y)).numpy()).all()
    theirs = hv.Hypervolume(torch.as_tensor(-reference)).compute(torch.as_tensor(-y[non_dominated(y)]))
    assert hypervolume(y, reference) == pytest.approx(theirs, rel=1e-12)


def test_volumes_by_hand_and_by_counting():
    assert hypervolume([[0.0, 0.0, 0.0]], [1.0, 2.0, 3.0]) == 6.0
    assert hypervolume([[0, 1], [1, 0]], [2, 2]) == 3.0
    assert hypervolume([[2.0, 0.0]], [1.0, 1.0]) == 0.0 == hypervolume(np.empty((0, 2)), [1.0, 1.0])
    rng = np.random.default_rng(0)
    y, u = rng.random((8, 3)), rng.random((40_000, 3))
    share = (y[:, None] <= u).all(-1).any(0).mean()
    assert hypervolume(y, np.ones(3)) == pytest.approx(share, abs=4 * np.sqrt(share / len(u)))


def test_the_reference_point_is_on_the_worse_side_of_every_point():
    y = np.random.default_rng(1).normal(size=(20, 3))
    reference = reference_point(y)
    assert (reference > y.max(0)).all()
    np.testing.assert_allclose(reference, y.max(0) + 0.1 * (y.max(0) - y.min(0)))
    assert all(hypervolume(y[k : k + 1], reference) > 0 for k in range(20))
    assert (reference_point([[1.0, 2.0]]) > [1.0, 2.0]).all()  # one point, or all equal


# The problem with a known front ---------------------------------------------------------------------------------------


def test_no_feasible_point_beats_the_known_front():
    problem = ThreeBowls(3)
    best = problem.best_points(12)
    assert (problem.constraint(best) <= 1e-12).all()
    front = problem.objectives(best)
    some = np.random.default_rng(0).random((20_000, 3))
    tried = problem.objectives(some[problem.constraint(some)[:, 0] <= 0])
    assert not ((tried[:, None] <= front) & (tried[:, None] < front - 1e-9)).all(-1).any()


def test_the_front_is_where_weighted_sums_are_least():
    """Against a general solver: the point that minimises a weighted sum under the constraint."""
    from scipy.optimize import minimize

    problem = ThreeBowls(3)
    for weights in np.random.default_rng(0).dirichlet(np.ones(3), 5):
        found = minimize(
            lambda x, w=weights: w @ problem.objectives(x[None])[0],
            np.array([0.2, 0.2, 0.3]),
            constraints={"type": "ineq", "fun": lambda x: BOUND - x[:2] @ NORMAL},
            tol=1e-12,
        )
        mean = weights @ BEST
        expected = mean - max(mean @ NORMAL - BOUND, 0.0) * NORMAL
        np.testing.assert_allclose(found.x, [*expected, 0.5], atol=1e-5)


@pytest.mark.system
def test_the_known_front_scores_one_and_infeasible_points_nothing():
    problem = ThreeBowls(3)
    assert problem.score(0.9999 * problem.best_points()) == pytest.approx(1.0, abs=1e-3)  # a little inside the bound
    assert problem.score(np.array([[0.9, 0.9, 0.5]])) == 0.0
    finer = type(problem)(3)
    finer.front = problem.objectives(problem.best_points(110))
    assert finer.optimum == pytest.approx(problem.optimum, rel=2e-3)  # the grid is fine enough
