"""Which option is the answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def choose_options(log_probabilities: ArrayLike, totals: ArrayLike, texts: Sequence[Sequence[str]]) -> list[int]:
    """The most probable option of every question.

    Of equally probable ones that of the largest total log-likelihood is taken, of equal ones of those the first in
    lexicographic order, so that the order in which options are given does not matter.

    Args:
        log_probabilities: ``[N, O]``, from length-normalised likelihoods; ``-inf`` where there is no such option.
        totals: ``[N, O]``, log-likelihood of the whole option.
        texts: the options of every question.
    """
    scores = zip(np.asarray(log_probabilities), np.asarray(totals), texts, strict=True)
    return [
        min(range(len(options)), key=lambda k: (-probability[k], -total[k], options[k], k))
        for probability, total, options in scores
    ]
