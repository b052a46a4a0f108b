"""Data shared by the tests of the metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

quick = settings(deadline=None, max_examples=60)
"""For property tests: a slow machine is no failure."""

Case = tuple[NDArray[Any], NDArray[Any]]


def random_case(seed: int, rows: int = 200, classes: int = 4, sharpness: float = 2.0) -> Case:
    """Softmax of noise, and labels drawn from a flatter softmax, so that the model is overconfident."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(rows, classes))
    return softmax(logits), draw_labels(rng, softmax(0.5 * logits))


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draw_labels(rng: np.random.Generator, probs: NDArray[Any]) -> NDArray[Any]:
    cumulative = np.cumsum(probs, axis=-1)[:, :-1]
    return (rng.random((len(probs), 1)) > cumulative).sum(axis=-1)


@st.composite
def classifications(draw: st.DrawFn, max_rows: int = 12, max_classes: int = 5) -> Case:
    """Small integer shares: many equal confidences, zeros, ones and values on bin edges."""
    rows, classes = draw(st.integers(1, max_rows)), draw(st.integers(1, max_classes))
    row = st.lists(st.integers(0, 4), min_size=classes, max_size=classes).filter(any)
    shares = np.array(draw(st.lists(row, min_size=rows, max_size=rows)), dtype=np.float64)
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from([np.float64, np.float32]))
    return (shares / shares.sum(axis=-1, keepdims=True)).astype(dtype), np.array(labels)


@st.composite
def outcomes(draw: st.DrawFn, max_rows: int = 12, levels: int = 4) -> Case:
    """Confidences on a coarse grid, so that most are tied, and whether each was right."""
    pairs = draw(st.lists(st.tuples(st.integers(0, levels), st.booleans()), min_size=1, max_size=max_rows))
    confidence, correct = zip(*pairs, strict=True)
    return np.array(confidence) / levels, np.array(correct)
