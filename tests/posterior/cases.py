"""Inputs shared by the tests of the maths."""

import torch

from bayeslora.posterior.projection import Side


def random_side(m, width, d, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(layers, m, width, generator=generator, dtype=torch.float64) / m**0.5
    return Side(z, torch.full((layers, m), d, dtype=torch.float64))
