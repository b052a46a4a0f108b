from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from bayeslora.metrics import accuracy, aurc, brier, nll, token_scores

from .cases import random_case


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 5])
def test_agrees_with_scikit_learn(seed: int, classes: int) -> None:
    probs, labels = random_case(seed, classes=classes)
    names = list(range(classes))
    assert accuracy(probs, labels) == accuracy_score(labels, probs.argmax(-1))
    assert nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=names), rel=1e-12)
    expected = brier_score_loss(labels, probs, labels=names, scale_by_half=False)
    assert brier(probs, labels) == pytest.approx(expected, rel=1e-12)


def test_worked_by_hand() -> None:
    probs, labels = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]], [1, 1]
    assert accuracy(probs, labels) == 0.5
    assert nll(probs, labels) == pytest.approx(math.log(4) / 2)
    assert brier(probs, labels) == pytest.approx((0.25 + 0.5625 + 0.0625) / 2)


def test_of_equal_classes_the_first_is_taken() -> None:
    assert accuracy([[0.5, 0.5], [0.5, 0.5]], [0, 1]) == 0.5
    assert accuracy([[0.5, 0.5]], [0]) == 1.0


@pytest.mark.filterwarnings("error")
def test_impossible_label_makes_nll_infinite_without_a_warning() -> None:
    assert nll([[1.0, 0.0], [0.5, 0.5]], [1, 0]) == math.inf


def test_perfect_prediction_is_plain_zero() -> None:
    assert str(nll([[1.0, 0.0]], [0])) == "0.0"
    assert brier([[1.0, 0.0]], [0]) == 0.0


def test_brier_of_certain_error_is_two() -> None:
    assert brier([[1.0, 0.0, 0.0]], [2]) == 2.0


def test_one_hot_integers_are_probabilities() -> None:
    assert brier([[0, 1], [1, 0]], [1, 1]) == 1.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([[0.5, 0.5]], dtype=torch.bfloat16), "(Got unsupported ScalarType BFloat16)"),
        (torch.tensor([[0.5, 0.5]], requires_grad=True), "(Can't call numpy() on Tensor that requires grad"),
    ],
)
def test_tensors_that_numpy_cannot_read(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"probs cannot be read as an array {message}")):
        accuracy(tensor, [0])
    elsewhere = torch.zeros(1, dtype=torch.long, device="meta")  # as on a GPU
    with pytest.raises(ValueError, match="labels cannot be read as an array"):
        accuracy([[0.5, 0.5]], elsewhere)
    with pytest.raises(ValueError, match="labels cannot be read as an array"):
        token_scores([[0.5, 0.5]], elsewhere)
    with pytest.raises(ValueError, match="correct cannot be read as an array"):
        aurc([0.5], elsewhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_tensors(dtype: torch.dtype) -> None:
    probs, labels = random_case(0)
    tensors = torch.tensor(probs, dtype=dtype), torch.tensor(labels)
    for metric in (accuracy, nll, brier):
        assert metric(*tensors) == pytest.approx(metric(probs, labels), rel=1e-6)


def test_float32_is_summed_in_float64() -> None:
    probs = np.full((2_000_000, 2), 0.5, dtype=np.float32)
    probs[:, 0] = np.float32(0.1)
    probs[:, 1] = np.float32(0.9)
    labels = np.zeros(len(probs), dtype=np.int64)
    exact = float(np.float32(0.1)), float(np.float32(0.9))
    assert nll(probs, labels) == pytest.approx(-math.log(exact[0]), rel=1e-12)
    assert brier(probs, labels) == pytest.approx((exact[0] - 1) ** 2 + exact[1] ** 2, rel=1e-12)


def test_inputs_are_left_alone() -> None:
    probs, labels = random_case(1)
    before = probs.copy(), labels.copy()
    brier(probs, labels), nll(probs, labels), accuracy(probs, labels)
    assert np.array_equal(probs, before[0])
    assert np.array_equal(labels, before[1])
