"""Distances from a fitted Gaussian, against dense algebra, scikit-learn and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.distance import mahalanobis
from sklearn.covariance import ledoit_wolf

from bayeslora.metrics import FeatureGaussian, fit_gaussian
from bayeslora.metrics.mahalanobis import LEAST_SHRINKAGE

SHAPES = [(200, 5), (60, 30), (40, 40), (25, 60), (12, 33), (3, 8)]
"""Number of vectors and of coordinates: more of either, and equal."""


def features(n: int, d: int, seed: int = 0) -> NDArray[np.float64]:
    """Correlated, of heavy tails, on scales that differ by factors of a thousand."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_t(5, size=(n, d)) @ rng.normal(size=(d, d))
    return mixed * np.logspace(-1, 2, d) + 10 * rng.normal(size=d)


def dense(x: NDArray[np.float64], shrinkage: float) -> NDArray[np.float64]:
    """The covariance that is meant, in the coordinates of the features."""
    correlation = np.corrcoef(x, rowvar=False)
    shrunk = (1 - shrinkage) * correlation + shrinkage * np.eye(x.shape[1])
    return np.asarray(shrunk * np.outer(x.std(0), x.std(0)))


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_distances_are_those_of_dense_algebra(n: int, d: int, seed: int) -> None:
    x, asked = features(n, d, seed), features(7, d, seed + 100)
    found = fit_gaussian(x)
    inverse = np.linalg.inv(dense(x, found.shrinkage))
    for rows in (x, asked):
        want = [mahalanobis(row, x.mean(0), inverse) for row in rows]
        np.testing.assert_allclose(found.distances(rows), want, rtol=1e-7)


@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_shrinkage_is_that_of_ledoit_and_wolf(n: int, d: int, seed: int) -> None:
    x = features(n, d, seed)
    _, want = ledoit_wolf((x - x.mean(0)) / x.std(0))
    assert fit_gaussian(x).shrinkage == pytest.approx(max(want, LEAST_SHRINKAGE), rel=1e-9)


def test_few_vectors_are_shrunk_more_than_many() -> None:
    x = features(2000, 20)
    few, many = fit_gaussian(x[:30]), fit_gaussian(x)
    assert LEAST_SHRINKAGE < many.shrinkage < 0.1 < few.shrinkage < 1


def test_distances_do_not_depend_on_units_and_offsets() -> None:
    x, asked = features(50, 9), features(5, 9, seed=1)
    factors, offset = np.logspace(-4, 4, 9), np.arange(9) - 3.0
    want = fit_gaussian(x).distances(asked)
    np.testing.assert_allclose(fit_gaussian(x * factors + offset).distances(asked * factors + offset), want, rtol=1e-8)


def test_vectors_like_those_of_the_fit_are_near_and_others_far() -> None:
    x = features(3000, 16)
    found = fit_gaussian(x[:2000])
    inside = found.distances(x[2000:])
    assert np.sqrt(np.mean(inside**2)) == pytest.approx(4, rel=0.1)  # the root of the dimension
    assert found.distances(x[2000:] + 5 * x.std(0)).min() > np.median(inside)


def test_a_direction_that_was_never_seen_counts_most() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 12))
    found = fit_gaussian(x)
    _, _, every = np.linalg.svd((x - x.mean(0)) / x.std(0))
    seen, unseen = x.mean(0) + every[0] * x.std(0), x.mean(0) + every[-1] * x.std(0)
    near, far = found.distances(np.stack([seen, unseen]))
    assert far == pytest.approx(1 / np.sqrt(found.shrinkage)) and far > 3 * near


@pytest.mark.parametrize("n", [2, 5])
def test_features_that_do_not_vary_are_handled(n: int) -> None:
    found = fit_gaussian(np.full((n, 4), 0.1))
    np.testing.assert_allclose(found.distances(np.full((1, 4), 0.1)), 0, atol=1e-12)
    assert np.isfinite(found.distances(np.ones((1, 4)))).all()
    x = features(20, 4)
    x[:, 2] = 0.3
    assert fit_gaussian(x).scale[2] == 1 and np.isfinite(fit_gaussian(x).distances(features(3, 4))).all()


@pytest.mark.parametrize("n", [100, 5000])
def test_rounding_of_a_sum_is_no_variation(n: int) -> None:
    """A sum of many equal numbers is rounded, so their mean is not quite their value, and their variance not quite zero."""
    x = features(n, 4)
    without = fit_gaussian(np.delete(x, 2, axis=1)).distances(np.delete(x[:1], 2, axis=1))
    x[:, 2] = 0.1
    moved = x[:1] + np.array([0, 0, 1e-12, 0])
    assert fit_gaussian(x).scale[2] == 1
    np.testing.assert_allclose(fit_gaussian(x).distances(moved), without, rtol=0.05)


def test_single_precision_is_computed_in_double() -> None:
    x = features(40, 6).astype(np.float32)
    assert fit_gaussian(x).mean.dtype == np.float64
    np.testing.assert_array_equal(fit_gaussian(x).distances(x), fit_gaussian(x.astype(float)).distances(x))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (np.ones(3), "shape"),
        (np.ones((0, 3)), "shape"),
        (np.ones((1, 3)), "two rows"),
        ([[0.0, 1.0], [np.nan, 2.0]], "finite"),
        ([["a", "b"]], "real numbers"),
    ],
)
def test_other_features_are_refused(given: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        fit_gaussian(given)  # type: ignore[arg-type]


def test_features_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="5 columns, got 4"):
        fit_gaussian(features(9, 5)).distances(features(2, 4))


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": np.zeros(2)},
        {"scale": np.ones(3)},
        {"variances": np.array([-1.0])},
        {"directions": np.array([[1.0, np.inf]])},
        {"shrinkage": 0.0},
        {"shrinkage": float("nan")},
    ],
)
def test_a_gaussian_with_impossible_parts_is_refused(changes: dict[str, object]) -> None:
    parts = {"mean": np.zeros(2), "scale": np.ones(2), "directions": np.eye(2)[:1], "variances": np.ones(1)}
    with pytest.raises(ValueError, match="must"):
        FeatureGaussian(**{**parts, "shrinkage": 0.5, **changes})  # type: ignore[arg-type]
