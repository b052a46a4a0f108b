"""Calibration: is the model right in 80 % of the cases in which it says 80 %?

Rows are binned by confidence (the largest probability), and the mean confidence of each bin is compared
with its accuracy:

    ECE = Σ_b n_b/N |acc_b − conf_b|,      MCE = max_b |acc_b − conf_b|

Equal-width bins are ``((b−1)/B, b/B]``: a confidence on an edge is in the bin it closes, 0 is in the
first. Edges are compared in the dtype of the input, so float32(0.2) is on the edge 3/15 although it is
greater than the number 0.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.scores import top_class
from bayeslora.metrics.validation import (
    BoolArray,
    FloatArray,
    check_classification,
    check_confidence,
    check_count,
    check_present,
    refuse,
)

BINS = 15
"""Default number of bins of a calibration error."""


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """A reliability diagram as numbers.

    Attributes:
        edges: ``[B + 1]``, ``b/B`` in the dtype of the confidences.
        count: ``[B]``, rows per bin.
        confidence: ``[B]``, mean confidence per bin; NaN where there are no rows.
        accuracy: ``[B]``, share of correct rows per bin; NaN where there are no rows.
    """

    edges: FloatArray
    count: NDArray[np.int64]
    confidence: NDArray[np.float64]
    accuracy: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"ReliabilityBins({len(self.count)} bins, {self.count.sum()} rows, ECE {self.ece:.3f})"

    @property
    def gap(self) -> NDArray[np.float64]:
        """``acc_b − conf_b``: negative where the model is overconfident, NaN where there are no rows."""
        return self.accuracy - self.confidence

    @property
    def ece(self) -> float:
        """Expected calibration error: mean absolute gap, weighted by count."""
        return float(np.nansum(self.count * np.abs(self.gap)) / self.count.sum())

    @property
    def mce(self) -> float:
        """Maximum calibration error: the largest absolute gap of a bin that has rows."""
        return float(np.nanmax(np.abs(self.gap)))

    def __add__(self, other: ReliabilityBins) -> ReliabilityBins:
        """The bins of the rows of both: what does not fit into memory is binned chunk by chunk."""
        if len(self.count) != len(other.count):
            raise ValueError(f"cannot add {len(self.count)} bins and {len(other.count)}; use the same number for all")
        count = self.count + other.count
        return ReliabilityBins(self.edges, count, *(_joined(self, other, name) for name in ("confidence", "accuracy")))


def reliability_bins(probs: ArrayLike, labels: ArrayLike, bins: int = BINS) -> ReliabilityBins:
    """Confidence and accuracy in ``bins`` bins of equal width."""
    return _equal_width(*top_class(*check_classification(probs, labels)), check_count(bins, "bins"))


def reliability_bins_from_confidence(
    confidence: ArrayLike,
    correct: ArrayLike,
    bins: int = BINS,
) -> ReliabilityBins:
    """:func:`reliability_bins` for pairs ``confidence [N]`` in [0, 1] and ``correct [N]``."""
    return _equal_width(*check_confidence(confidence, correct), check_count(bins, "bins"))


def ece(probs: ArrayLike, labels: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error of the most probable class, bins of equal width."""
    return reliability_bins(probs, labels, bins).ece


def ece_from_confidence(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """:func:`ece` for pairs ``confidence [N]`` in [0, 1] and ``correct [N]``."""
    return reliability_bins_from_confidence(confidence, correct, bins).ece


def adaptive_ece(probs: ArrayLike, labels: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error with bins of equal mass instead of equal width.

    Rows in order of confidence are cut into ``bins`` runs whose lengths differ by at most 1, the longer
    ones first (:func:`numpy.array_split`). Equal confidences are never split, else the result would
    depend on the order of rows: all of them go to the bin of the first, that is, a cut among equal ones moves
    behind the last.
    """
    confidence, correct = top_class(*check_classification(probs, labels))
    order = np.argsort(confidence)
    confidence, correct = confidence[order], correct[order]
    runs = np.array_split(order, check_count(bins, "bins"))
    bin_of_position = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    first_of_equals = np.searchsorted(confidence, confidence, side="left")
    members = bin_of_position[first_of_equals]
    surplus = np.bincount(members, weights=correct - confidence.astype(np.float64))
    return float(np.abs(surplus).sum() / len(confidence))


def classwise_ece(
    probs: ArrayLike,
    labels: ArrayLike,
    bins: int = BINS,
    present: ArrayLike | None = None,
) -> float:
    """Mean over classes of the calibration error of each class's own probability.

    Class ``c`` is taken as a yes-or-no question with confidence ``p_c``, right where ``y = c``.

    Args:
        probs: ``[N, C]``.
        labels: ``[N]``.
        bins: number of bins of equal width.
        present: boolean ``[N, C]``, which options a row offers. Rows without an option do not count for
            its class (there the trivially right probability 0 would flatter it), and a class that no row
            offers is left out.
    """
    p, y = check_classification(probs, labels)
    bins = check_count(bins, "bins")
    mask = check_present(present, p)
    refuse(~mask[np.arange(len(y)), y], y, "labels must be options that are present")
    errors = [_equal_width(p[rows, c], y[rows] == c, bins).ece for c, rows in enumerate(mask.T) if rows.any()]
    return float(np.mean(errors))


def bin_of(confidence: FloatArray, bins: int) -> NDArray[np.int64]:
    """Index of the equal-width bin of every confidence."""
    return np.clip(np.searchsorted(_edges(confidence, bins), confidence, side="left") - 1, 0, bins - 1)


def _edges(confidence: FloatArray, bins: int) -> FloatArray:
    return (np.arange(bins + 1) / bins).astype(confidence.dtype)


def _joined(one: ReliabilityBins, other: ReliabilityBins, name: str) -> NDArray[np.float64]:
    """Means per bin over the rows of both; NaN where there are no rows."""
    sums = sum(np.where(it.count > 0, it.count * getattr(it, name), 0.0) for it in (one, other))
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / (one.count + other.count))


def _equal_width(confidence: FloatArray, correct: BoolArray, bins: int) -> ReliabilityBins:
    members = bin_of(confidence, bins)
    count = np.bincount(members, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(members, weights=confidence, minlength=bins) / count
        mean_correct = np.bincount(members, weights=correct, minlength=bins) / count
    return ReliabilityBins(_edges(confidence, bins), count, mean_confidence, mean_correct)
