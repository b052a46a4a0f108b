"""Fit a temperature to distributions over a vocabulary, which do not fit into memory, in a few sweeps.

The NLL of ``softmax(β log p)`` is convex in ``β = 1/T``, and its slope is ``mean(E_β[log p] − log p_y)``. A sweep computes
the slope at many ``β`` at once, and the next one searches between the two where it changes sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bayeslora.predict.calibrate import TEMPERATURES

Sweep = Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]
"""Yields log-probabilities ``[tokens, vocabulary]`` and labels ``[tokens]`` by chunks, given number and total of the sweeps."""

SWEEPS = 2
POINTS = 17
"""Together they leave 2 % of ``β`` to linear interpolation, which errs by less than 1e-4 there."""


def fit_token_temperature(sweep: Sweep) -> float:
    """Fit the temperature in :data:`bayeslora.predict.calibrate.TEMPERATURES` of least mean NLL.

    As with :func:`bayeslora.predict.calibrate.fit_temperature`, a result at either bound means that the data do not
    determine it, and if no temperature changes anything it is 1.
    """
    least, greatest = TEMPERATURES
    betas = np.geomspace(1 / greatest, 1 / least, POINTS)
    for number in range(SWEEPS):
        slopes = _slopes(sweep(number, SWEEPS), betas)
        if not np.any(slopes):
            return 1.0
        if slopes[0] >= 0:
            return float(1 / betas[0])
        if slopes[-1] <= 0:
            return float(1 / betas[-1])
        above = int(np.argmax(slopes > 0))
        below, pair = above - 1, slopes[above - 1 : above + 1]
        low, high = np.log(betas[below]), np.log(betas[above])
        betas = np.geomspace(betas[below], betas[above], POINTS)
    return float(np.exp(-(low - pair[0] * (high - low) / (pair[1] - pair[0]))))


@torch.no_grad()
def _slopes(chunks: Iterable[tuple[Tensor, Tensor]], betas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the slopes of all tokens, at every β."""
    total = np.zeros(len(betas))
    for log_probabilities, labels in chunks:
        right = log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1).double()
        for index, beta in enumerate(betas):
            weights = (beta * log_probabilities).softmax(-1)
            expected = torch.where(weights > 0, weights * log_probabilities, 0.0).sum(-1).double()
            total[index] += float((expected - right).sum())
    return total
