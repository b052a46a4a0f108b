"""The acquisition against plain Monte Carlo with our own volumes, and searches that must get better."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

botorch = pytest.importorskip("botorch")

from scipy.stats import norm  # noqa: E402

from bayeslora.tuning import propose as module  # noqa: E402
from bayeslora.tuning.front import hypervolume  # noqa: E402
from bayeslora.tuning.points import sobol  # noqa: E402
from bayeslora.tuning.propose import FeasibilityOnly, History, acquisition, propose, to_gains  # noqa: E402
from bayeslora.tuning.synthetic import ThreeBowls  # noqa: E402

pytestmark = pytest.mark.system

PROBLEM = ThreeBowls(2)
NOISE = 0.02
AS_SHIPPED = {name: getattr(module, name) for name in ("DRAWS", "RAW_POINTS", "RESTARTS")}


def history(count: int = 9, seed: int = 0, shift: float = 0.0) -> History:
    x = sobol(2, 0, count, seed)
    noise = NOISE * np.random.default_rng(seed).normal(size=(count, 3))
    return History(x, PROBLEM.objectives(x) + noise, PROBLEM.constraint(x) + shift)


def with_failures(known: History, failed: np.ndarray) -> History:
    objectives, constraints = known.objectives.copy(), known.constraints.copy()
    objectives[failed], constraints[failed] = np.nan, np.nan
    return History(known.x, objectives, constraints)


def posterior_by_hand(model: Any, known: History, outcome: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of one outcome at points, without noise, from the textbook and the model's fitted numbers."""
    limits = known.constraints / known.constraints.std(0)
    y = np.hstack([to_gains(known.objectives), limits])[:, outcome]
    kernel, noise = model.covar_module, model.likelihood.noise[outcome].item()
    scale, lengths = kernel.outputscale[outcome].item(), kernel.base_kernel.lengthscale[outcome, 0].detach().numpy()
    constant, spread = model.mean_module.constant[outcome].item(), y.std(ddof=1)

    def covariance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return scale * np.exp(-0.5 * (((a[:, None] - b[None]) / lengths) ** 2).sum(-1))

    weights = np.linalg.solve(covariance(known.x, known.x) + noise * np.eye(len(y)), covariance(known.x, x)).T
    mean = constant + weights @ ((y - y.mean()) / spread - constant)
    return y.mean() + spread * mean, spread**2 * (covariance(x, x) - weights @ covariance(known.x, x))


def draws(model: Any, known: History, x: np.ndarray, count: int) -> np.ndarray:
    """Of all outcomes at the points, without noise: ``[count, N, outcomes]``."""
    rng = np.random.default_rng(5)
    parts = (posterior_by_hand(model, known, k, x) for k in range(4))
    return np.stack([rng.multivariate_normal(*part, size=count, method="eigh") for part in parts], -1)


def chance(model: Any, known: History, point: np.ndarray) -> float:
    """Of keeping the constraint at a point."""
    mean, covariance = posterior_by_hand(model, known, 3, point[None])
    return float(norm.cdf(-mean[0] / np.sqrt(covariance[0, 0])))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"DRAWS": 16, "RAW_POINTS": 64, "RESTARTS": 2}.items():  # for speed
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("feasibility", ["mc", "pof"])
def test_the_gain_is_that_of_plain_monte_carlo(feasibility, monkeypatch):
    """Mean over draws of how much a point raises the hypervolume of the draw's own feasible front."""
    monkeypatch.setattr(module, "DRAWS", 256)
    known = history()
    assert known.feasible.any() and not known.feasible.all()
    torch.manual_seed(0)
    acquire = acquisition(known, feasibility, seed=0)
    reference = -getattr(acquire, "gain", acquire).ref_point.numpy()
    new = np.array([[0.36, 0.58], [0.43, 0.51], [0.5, 0.43], [0.35, 0.42], [0.9, 0.9]])  # the first three at the bound
    ours = acquire(torch.as_tensor(new)[:, None]).detach().exp().numpy()
    expected = []
    for point in new:
        drawn = draws(acquire.model, known, np.vstack([known.x, point]), 800)
        gains, limits = drawn[..., :3], drawn[..., 3:]
        kept = (limits <= 0).all(-1) if feasibility == "mc" else np.tile([*known.feasible, True], (len(gains), 1))
        rise = [
            hypervolume(-gain[keep], reference) - hypervolume(-gain[:-1][keep[:-1]], reference)
            for gain, keep in zip(gains, kept, strict=True)
        ]
        expected.append(np.mean(rise) * (chance(acquire.model, known, point) if feasibility == "pof" else 1.0))
    assert max(expected) > 0.02 > min(expected)
    np.testing.assert_allclose(ours, expected, atol=0.1 * max(expected))


def test_gains_are_negated_scaled_and_cut():
    objectives = np.array([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [900.0, 5.0]])
    gains = to_gains(objectives)
    cut = np.array([0.0, 1.0, 2.0, 3.0, 2.0 * module.HOPELESS])  # the median is 2 worse than the best
    np.testing.assert_allclose(gains[:, 0], -cut / cut.std())
    assert (gains[:, 1] == -5.0).all()


def test_outcomes_that_are_equal_but_for_rounding_stay_as_they_are():
    values = np.full((3, 1), -0.4) + np.array([[0.0], [5e-17], [0.0]])
    assert 0 < values.std() < 1e-16
    np.testing.assert_array_equal(to_gains(values), -values)


def test_the_reference_point_is_worse_than_all_feasible_trials_and_than_the_front_to_come():
    """Also where trials so far cover one end of the front only."""
    x = sobol(2, 0, 40, seed=1)
    x = x[(x[:, 0] < 0.35) | (PROBLEM.constraint(x)[:, 0] > 0)]  # feasible ones near the first objective's best point
    known = History(x, PROBLEM.objectives(x), PROBLEM.constraint(x))
    acquire = acquisition(known, "mc", seed=0)
    assert not np.isclose(x[known.feasible][:, 0].max(), 0.7, atol=0.2)
    gains = to_gains(known.objectives)
    assert (acquire.ref_point.numpy() < gains[known.feasible].min(0)).all()
    slope = np.polyfit(known.objectives[:, 0], gains[:, 0], 1)
    reach = np.polyval(slope, PROBLEM.front[:, 0].max())  # the far end of the true front, in the model's units
    assert acquire.ref_point[0] < 0.7 * reach < 0


def test_as_long_as_nothing_is_feasible_feasibility_alone_counts():
    known = history(shift=2.0)
    assert not known.feasible.any()
    acquire = acquisition(known, "mc", seed=0)
    assert isinstance(acquire, FeasibilityOnly)
    x = np.random.default_rng(0).random((6, 2))
    expected = [chance(acquire.model, known, point) for point in x]
    np.testing.assert_allclose(acquire(torch.as_tensor(x)[:, None]).detach().numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("failed", [0, 3])
@pytest.mark.parametrize("feasibility", ["mc", "pof"])
def test_a_batch_that_looks_for_feasible_settings_looks_in_several_places(feasibility, failed):
    known = with_failures(history(shift=2.0), np.arange(9) < failed)
    assert not known.feasible.any()
    points = propose(known, 4, feasibility, seed=0)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)[~np.eye(4, dtype=bool)]
    assert apart.min() > 0.02


def test_the_model_learns_where_trials_fail():
    known = history(12)
    failed = known.x[:, 0] < 0.4
    acquire = acquisition(with_failures(known, failed), "mc", seed=0)
    assert len(acquire.constraints) == 2 and acquire.X_baseline.shape[0] <= (~failed).sum()
    chances = FeasibilityOnly(acquire.model, [4])(torch.as_tensor(known.x)[:, None]).detach().numpy()
    assert (chances[failed] < 0.4).all() and (chances[~failed] > 0.6).all()


@pytest.mark.parametrize("feasibility", ["mc", "pof"])
def test_a_proposal_depends_on_its_arguments_alone(feasibility):
    known = history()
    state = torch.random.get_rng_state()
    first = propose(known, 2, feasibility, seed=3)
    assert (torch.random.get_rng_state() == state).all()
    torch.manual_seed(99)
    np.testing.assert_array_equal(propose(known, 2, feasibility, seed=3), first)
    assert first.shape == (2, 2) and ((first >= 0) & (first <= 1)).all() and not np.allclose(first[0], first[1])


def test_without_constraints_both_ways_are_one():
    known = history()
    free = History(known.x, known.objectives, known.constraints[:, :0])
    assert free.feasible.all()
    np.testing.assert_array_equal(propose(free, 1, "mc", seed=0), propose(free, 1, "pof", seed=0))


def test_outcomes_that_never_change_are_no_obstacle():
    known = history()
    equal = History(known.x, np.hstack([known.objectives[:, :2], np.full((len(known.x), 1), -0.5)]), known.constraints)
    assert np.isfinite(propose(equal, 1, "mc", seed=0)).all()


def test_sobol_points_depend_on_their_number_alone():
    whole = sobol(3, 0, 8, seed=2)
    np.testing.assert_array_equal(sobol(3, 5, 3, seed=2), whole[5:])
    assert not np.allclose(sobol(3, 0, 8, seed=3), whole)


def test_a_short_search_is_far_better_than_random():
    x = sobol(2, 0, 6, seed=0)
    while len(x) < 18:
        known = History(x, PROBLEM.objectives(x), PROBLEM.constraint(x))
        x = np.vstack([x, propose(known, 4, "mc", seed=len(x))])
    at_random = [PROBLEM.score(np.random.default_rng(seed).random((18, 2))) for seed in range(5)]
    assert PROBLEM.score(x) > 0.93 > max(at_random)


@pytest.mark.slow
@pytest.mark.parametrize("feasibility", ["mc", "pof"])
@pytest.mark.parametrize("seed", range(5))
def test_the_known_front_is_found_within_two_per_cent(seed, feasibility, monkeypatch):
    for name, value in AS_SHIPPED.items():
        monkeypatch.setattr(module, name, value)
    problem = ThreeBowls(3)
    x = sobol(3, 0, 8, seed)
    while len(x) < 48:
        known = History(x, problem.objectives(x), problem.constraint(x))
        x = np.vstack([x, propose(known, 4, feasibility, 1000 * seed + len(x))])
    assert problem.score(x) > 0.98 > problem.score(np.random.default_rng(seed).random(x.shape))


def test_botorch_has_nothing_to_say_against_it():
    """It warns of the plain form of the gain, whose slope vanishes where there is little to gain."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acquire = acquisition(history(), "mc", seed=0)
    x = torch.full((1, 1, 2), 0.95, dtype=torch.double, requires_grad=True)  # far from everything good
    acquire(x).sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0
