from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bayeslora.metrics import (
    TokenScores,
    accuracy,
    brier,
    ece,
    entropy,
    nll,
    reliability_bins_from_confidence,
    token_scores,
    top_entropy,
)

from .cases import quick, random_case, softmax


def text(seed: int = 0, shape: tuple[int, ...] = (3, 8), vocabulary: int = 11) -> tuple[NDArray, NDArray]:
    rng = np.random.default_rng(seed)
    probs = softmax(2 * rng.normal(size=(*shape, vocabulary)))
    return probs, rng.integers(vocabulary, size=shape)


def assert_equal(a: TokenScores, b: TokenScores) -> None:
    for field in fields(TokenScores):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), strict=True)


@pytest.mark.parametrize("shape", [(24,), (3, 8), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tokens_are_rows_of_a_classification(shape: tuple[int, ...], dtype: type) -> None:
    probs, labels = text(shape=shape)
    probs = probs.astype(dtype)
    scores = token_scores(probs, labels)
    flat = probs.reshape(24, -1), labels.reshape(24)
    assert len(scores) == 24
    assert scores.accuracy == accuracy(*flat)
    assert scores.nll == nll(*flat)
    assert scores.brier_score == brier(*flat)
    assert [scores.ece(), scores.ece(bins=4)] == [ece(*flat), ece(*flat, bins=4)]
    np.testing.assert_array_equal(scores.entropy, entropy(flat[0]))
    np.testing.assert_array_equal(scores.label_probability, flat[0][np.arange(24), flat[1]])
    assert scores.confidence.dtype == dtype


def test_masked_positions_are_not_looked_at() -> None:
    probs, labels = text()
    mask = np.random.default_rng(1).random(labels.shape) < 0.6
    expected = token_scores(probs[mask], labels[mask])
    probs[~mask], labels[~mask] = math.nan, -100
    assert 0 < len(expected) < labels.size
    assert_equal(token_scores(probs, labels, mask), expected)
    assert_equal(token_scores(probs, labels, mask.astype(int)), expected)


@pytest.mark.filterwarnings("error")
def test_torch_tensors() -> None:
    probs, labels = text()
    mask = labels > 3
    tensors = (torch.from_numpy(a) for a in (probs, labels, mask))
    assert_equal(token_scores(*tensors), token_scores(probs, labels, mask))


@quick
@given(st.lists(st.integers(0, 24), max_size=4))
def test_chunks_put_together_are_one_go(cuts: list[int]) -> None:
    probs, labels = text(shape=(24,))
    chunks = zip(np.split(probs, sorted(cuts)), np.split(labels, sorted(cuts)), strict=True)
    whole = token_scores(probs, labels)
    together = TokenScores.concatenate([token_scores(p, y) for p, y in chunks])
    assert_equal(together, whole)
    assert together.ece() == whole.ece()


def test_chunk_of_padding_adds_nothing() -> None:
    probs, labels = text()
    padding = token_scores(probs, labels, np.zeros(labels.shape, dtype=bool))
    assert len(padding) == 0
    whole = token_scores(probs, labels)
    assert_equal(TokenScores.concatenate([padding, whole, padding]), whole)


def test_subset_by_mask_and_by_position() -> None:
    probs, labels = random_case(0, rows=30)
    scores = token_scores(probs, labels)
    chosen = np.arange(30) % 3 == 1
    expected = token_scores(probs[chosen], labels[chosen])
    assert_equal(scores.subset(chosen), expected)
    assert_equal(scores.subset(np.flatnonzero(chosen)), expected)
    assert_equal(scores.subset(4), token_scores(probs[4:5], labels[4:5]))
    assert len(scores.subset([])) == 0


def test_impossible_token_makes_nll_infinite() -> None:
    assert token_scores([[1.0, 0.0]], [1]).nll == math.inf


def test_top_entropy_takes_the_highest_and_of_equals_the_first() -> None:
    assert top_entropy([0.1, 0.9, 0.5, 0.9], 0.5).tolist() == [False, True, False, True]
    assert top_entropy([0.5, 0.9, 0.5, 0.5], 0.75).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("n", "fraction", "count"),
    [(1, 0.05, 1), (20, 0.05, 1), (21, 0.05, 2), (100, 0.07, 7)],
)
def test_top_entropy_rounds_up(n: int, fraction: float, count: int) -> None:
    h = np.random.default_rng(0).random(n)
    chosen = top_entropy(h, fraction)
    assert chosen.sum() == count
    assert n == count or h[chosen].min() > h[~chosen].max()


def test_default_share_is_a_twentieth() -> None:
    assert top_entropy(np.arange(200)).tolist() == [False] * 190 + [True] * 10


def test_scores_and_bins_show_their_figures_on_one_line() -> None:
    scores = token_scores([[0.9, 0.1], [0.2, 0.8]], [0, 1])
    assert repr(scores) == f"TokenScores(2 tokens, NLL {scores.nll:.3f}, ECE {scores.ece():.3f})"
    assert repr(scores.subset([False, False])) == "TokenScores(0 tokens)"
    bins = reliability_bins_from_confidence(scores.confidence, scores.correct)
    assert repr(bins) == f"ReliabilityBins(15 bins, 2 rows, ECE {scores.ece():.3f})"
