"""Evenly spread points in the unit cube, for the start of a search."""

from __future__ import annotations

import numpy as np
import torch

from bayeslora.tuning.front import Floats


def sobol(dimension: int, first: int, count: int, seed: int) -> Floats:
    """Points ``[count, D]`` of a scrambled Sobol sequence, starting at number ``first``; each depends on its number alone."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=seed % 2**31)
    return np.asarray(engine.fast_forward(first).draw(count, dtype=torch.double).numpy())
