"""Which option is the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUND_OFF = 1e-6
"""Round-off of log-probabilities computed in float32."""


def choose_options(log_probabilities: ArrayLike, totals: ArrayLike, texts: Sequence[Sequence[str]]) -> list[int]:
    """The most probable option of every question.

    Ties are broken by the largest total log-likelihood, then by lexicographic order, so that the order of the options does
    not matter. Differences within round-off count as ties: the same tokens at another position of a sequence may differ in
    the last bit.

    Args:
        log_probabilities: ``[N, O]``, from length-normalised likelihoods; ``-inf`` where there is no such option.
        totals: ``[N, O]``, log-likelihood of the whole option.
        texts: the options of every question.
    """
    scores = zip(np.asarray(log_probabilities), np.asarray(totals), texts, strict=True)
    return [_choose(probability[: len(options)], total, options) for probability, total, options in scores]


def _choose(probability: NDArray[np.float64], total: NDArray[np.float64], options: Sequence[str]) -> int:
    best = np.flatnonzero(probability >= probability.max() - ROUND_OFF)
    best = best[total[best] >= total[best].max() - ROUND_OFF * max(1.0, abs(float(total[best].max())))]
    return int(min(best, key=lambda k: (options[k], k)))
