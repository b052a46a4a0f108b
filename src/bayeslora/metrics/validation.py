"""Input checks of all metrics; every failure is a ``ValueError`` that reports the offending value.

Probabilities are ``[N, C]``, or ``[..., C]`` where stated: finite, not negative, rows that sum to 1. Rows
may offer different numbers of options (three answers here, five there); an absent option is a column with
probability 0.

Arrays keep the floating dtype they come in, because bin edges are compared in it; sums are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.integer[Any]]
BoolArray = NDArray[np.bool_]

ROW_SUM_TOLERANCE = 1e-4
"""How far the sum of a row may be from 1: room for float32, not for float16 or for logits."""

_ROUND_OFF = 1e-12


def check_classification(
    probs: ArrayLike,
    labels: ArrayLike,
    name: str = "probs",
) -> tuple[FloatArray, IntArray]:
    """``probs [N, C]`` and ``labels [N]`` as arrays."""
    p = check_probabilities(probs, "NC", name)
    return p, check_labels(labels, p)


def check_probabilities(probs: ArrayLike, shape: str = "NC", name: str = "probs") -> FloatArray:
    """Probabilities as an array; ``shape`` spells its dimensions, a leading ``...`` stands for any number."""
    p = real_array(probs, name)
    letters = shape.removeprefix("...")
    fits = p.ndim == len(letters) or (shape != letters and p.ndim > len(letters))
    if not fits:
        dimensions = ", ".join(["..."] * (shape != letters) + list(letters))
        raise ValueError(f"{name} must have shape [{dimensions}], got shape {p.shape}")
    if p.size == 0:
        raise ValueError(f"{name} is empty: got shape {p.shape}, expected at least one row and one class")
    check_rows(p, name)
    return p


def check_rows(p: FloatArray, name: str) -> None:
    """Every row along the last dimension is a distribution. No rows at all pass."""
    refuse(~np.isfinite(p), p, f"{name} must be finite")
    refuse(p < 0, p, f"{name} must not be negative")
    sums = p.sum(axis=-1, dtype=np.float64)
    rule = f"rows of {name} must sum to 1 within {ROW_SUM_TOLERANCE} (logits need a softmax in float32 first)"
    refuse(np.abs(sums - 1.0) > ROW_SUM_TOLERANCE, sums, rule, what="sum")


def check_labels(labels: ArrayLike, probs: NDArray[Any]) -> IntArray:
    """One integer label per row of ``probs [N, C]``, which may be probabilities or prediction sets."""
    y = read_array(labels, "labels")
    if y.shape != probs.shape[:1]:
        raise ValueError(f"labels must have shape {probs.shape[:1]}, one per row, got shape {y.shape}")
    return check_label_values(y, probs.shape[-1])


def check_label_values(labels: NDArray[Any], classes: int) -> IntArray:
    """Integers from 0 to ``classes - 1``."""
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers, got dtype {labels.dtype}")
    refuse((labels < 0) | (labels >= classes), labels, f"labels must be from 0 to {classes - 1}")
    return labels.astype(np.intp, copy=False)


def check_present(present: ArrayLike | None, probs: NDArray[Any]) -> BoolArray:
    """Which options exist, ``[N, C]``; all of them if not given. An absent option has probability 0."""
    if present is None:
        return np.ones(probs.shape, dtype=bool)
    mask = _boolean(present, "present", probs.shape)
    refuse(~mask & (probs > 0), probs, "options that are not present must have probability 0")
    return mask


def check_scores(scores: ArrayLike, name: str) -> FloatArray:
    """One finite number per row, ``[N]``."""
    s = real_array(scores, name)
    if s.ndim != 1:
        raise ValueError(f"{name} must have shape [N], got shape {s.shape}")
    if s.size == 0:
        raise ValueError(f"{name} is empty: expected at least one number")
    refuse(~np.isfinite(s), s, f"{name} must be finite")
    return s


def check_outcomes(
    scores: ArrayLike, outcomes: ArrayLike, names: tuple[str, str] = ("confidence", "correct")
) -> tuple[FloatArray, BoolArray]:
    """Numbers ``[N]`` and their outcomes as booleans ``[N]`` (integers 0 and 1 are accepted)."""
    s = check_scores(scores, names[0])
    return s, _boolean(outcomes, names[1], s.shape)


def check_confidence(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, BoolArray]:
    """Pairs as in :func:`check_outcomes` whose confidence is a probability."""
    s, outcomes = check_outcomes(confidence, correct)
    refuse((s < 0) | (s > 1 + ROW_SUM_TOLERANCE), s, "confidence must be from 0 to 1")
    return s, outcomes


def check_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> BoolArray:
    """A boolean mask of this shape; all true if not given."""
    return np.ones(shape, dtype=bool) if mask is None else _boolean(mask, "mask", shape)


def check_count(count: int, name: str) -> int:
    """A count, at least 1."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
    return int(count)


def check_open_share(share: float, name: str) -> float:
    """A number strictly between 0 and 1."""
    if not 0 < share < 1:
        raise ValueError(f"{name} must be between 0 and 1, both excluded, got {share}")
    return float(share)


def share_to_count(share: float, n: int, name: str) -> int:
    """``⌈share · n⌉`` for a share in (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {share}")
    return ceil_product(share, n)


def ceil_product(share: float, n: int) -> int:
    """``⌈share · n⌉`` without round-off error: 7 for ``0.07 · 100``, which is 7.000000000000001."""
    return math.ceil(share * n * (1 - _ROUND_OFF))


def real_array(values: ArrayLike, name: str) -> FloatArray:
    """Floating values unchanged, integers (and types wider than float64) as float64."""
    a = read_array(values, name)
    if a.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be real numbers, got dtype {a.dtype}")
    return a if a.dtype in (np.float16, np.float32, np.float64) else a.astype(np.float64)


def read_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Values of any kind as an array."""
    try:
        return np.asarray(values)
    except (TypeError, RuntimeError) as error:  # of torch, for a tensor on a GPU, in bfloat16 or with a gradient
        raise ValueError(f"{name} cannot be read as an array ({error})") from error


def refuse(bad: BoolArray, values: NDArray[Any], rule: str, what: str = "value") -> None:
    """Raise with the rule, the first offending value and where it is."""
    if not bad.any():
        return
    index = tuple(int(k) for k in np.unravel_index(int(np.argmax(bad)), bad.shape))
    place = f"row {index[0]}" if len(index) == 1 else f"index {index}"
    raise ValueError(f"{rule}, got {what} {values[index]} at {place}")


def _boolean(values: ArrayLike, name: str, shape: Sequence[int]) -> BoolArray:
    a = read_array(values, name)
    if a.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got shape {a.shape}")
    if a.dtype.kind == "b":
        return a
    if a.dtype.kind not in "iu":
        raise ValueError(f"{name} must be booleans (or integers 0 and 1), got dtype {a.dtype}")
    refuse((a != 0) & (a != 1), a, f"{name} must be booleans (or integers 0 and 1)")
    return a.astype(bool)
