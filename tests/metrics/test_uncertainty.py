from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import entropy as scipy_entropy

from bayeslora.metrics import entropy, entropy_split

from .cases import quick, softmax


@st.composite
def draws(draw: st.DrawFn) -> NDArray[Any]:
    """Predictions ``[n, N, C]`` from flat to one-hot, with exact zeros."""
    shape = tuple(draw(st.integers(1, high)) for high in (5, 4, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    probs = softmax(draw(st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1000.0])) * rng.normal(size=shape))
    return probs.astype(draw(st.sampled_from([np.float32, np.float64])))


@pytest.mark.filterwarnings("error")
def test_zero_log_zero_is_zero() -> None:
    np.testing.assert_array_equal(entropy([[1.0, 0.0], [0.5, 0.5]]), [0.0, math.log(2)])
    assert not np.signbit(entropy([1.0, 0.0]))


@pytest.mark.parametrize("shape", [(3,), (7, 3), (2, 7, 3), (2, 1, 5, 4)])
def test_entropy_agrees_with_scipy_on_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    probs = softmax(3 * np.random.default_rng(0).normal(size=shape))
    result = entropy(probs)
    assert result.shape == shape[:-1]
    np.testing.assert_allclose(result, scipy_entropy(probs, axis=-1), rtol=1e-12)


def test_uniform_prediction_has_log_of_the_number_of_options() -> None:
    probs = np.full((1, 8), 1 / 8)
    assert entropy(probs)[0] == pytest.approx(math.log(8))


def test_agreement_is_aleatoric_and_disagreement_epistemic() -> None:
    same = [[[0.5, 0.5]], [[0.5, 0.5]]]
    opposed = [[[1.0, 0.0]], [[0.0, 1.0]]]
    for probs, aleatoric, epistemic in ((same, math.log(2), 0.0), (opposed, 0.0, math.log(2))):
        split = entropy_split(probs)
        assert split.total.tolist() == pytest.approx([math.log(2)])
        assert split.aleatoric.tolist() == pytest.approx([aleatoric])
        assert split.epistemic.tolist() == pytest.approx([epistemic])


@quick
@given(draws())
def test_split_follows_its_definition(probs: NDArray[Any]) -> None:
    split = entropy_split(probs)
    exact = probs.astype(np.float64)
    mean = exact.sum(0) / len(exact)
    divergence = np.zeros(probs.shape[1])
    for k, row, c in np.argwhere(exact > 0):
        divergence[row] += exact[k, row, c] * math.log(exact[k, row, c] / mean[row, c]) / len(exact)
    np.testing.assert_allclose(split.total, entropy(mean), atol=1e-12)
    np.testing.assert_allclose(split.aleatoric, [entropy(exact[:, i]).mean() for i in range(exact.shape[1])])
    np.testing.assert_allclose(split.epistemic, divergence, atol=1e-12)


@quick
@given(draws())
def test_no_part_is_negative_and_parts_add_up(probs: NDArray[Any]) -> None:
    split = entropy_split(probs)
    for part in (split.total, split.aleatoric, split.epistemic):
        assert part.shape == (probs.shape[1],)
        assert (part >= 0).all()
    np.testing.assert_allclose(split.aleatoric + split.epistemic, split.total, atol=1e-12)
    assert (split.total <= math.log(probs.shape[-1]) + 1e-6).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_draws_have_no_epistemic_part_but_round_off(dtype: type) -> None:
    one = softmax(np.random.default_rng(0).normal(size=(1, 50, 7))).astype(dtype)
    split = entropy_split(np.repeat(one, 10, axis=0))
    assert (split.epistemic >= 0).all()
    assert split.epistemic.max() < 1e-14
