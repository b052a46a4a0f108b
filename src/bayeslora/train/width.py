"""How wide the posterior is in the end: as it was trained, or as held-out data want it."""

from __future__ import annotations

import math
from collections.abc import Callable

FACTOR = 2.0
"""Between two scales that are tried."""

LEAST, MOST = 0.25, 16.0
"""The smallest scale, at which draws hardly differ any more, and the largest."""


def try_scales(nll: Callable[[float], float]) -> dict[float, float]:
    """The NLL of every scale of the posterior that was tried: 1, then twice as much each time for as long as the NLL falls,
    or half as much if twice as much is no better. Two scales are tried besides 1 where that is best already.

    Args:
        nll: of held-out data, with the same noise at every scale: else the best draw wins instead of the best scale.
    """
    tried = {1.0: nll(1.0)}
    for factor in (FACTOR, 1.0 / FACTOR):
        scale = factor
        while LEAST <= scale <= MOST:
            tried[scale] = nll(scale)
            if not tried[scale] < tried[scale / factor]:
                break
            scale *= factor
        if tried[factor] < tried[1.0]:
            break
    return tried


def best_scale(tried: dict[float, float]) -> float:
    """The scale of least NLL; of equal ones that nearest to 1."""
    return min(tried, key=lambda scale: (tried[scale], abs(math.log(scale))))
