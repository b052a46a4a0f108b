"""Standard normal noise for ``n`` draws: independent, or arranged so that an average over few draws errs less.

Each arrangement leaves every single draw standard normal, so averages stay unbiased. What is lost is independence
between draws, which nothing here relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Variates = Literal["independent", "antithetic", "latin"]
"""How the noise of several draws is arranged. ``antithetic``: in pairs of opposite noise, so that what is odd in the noise
cancels. ``latin``: a randomised Latin hypercube, in which the draws fill the range of every coordinate evenly. (Sobol points
would take seconds to scramble for so many coordinates.)"""


def standard_normal(
    shape: Sequence[int],
    generator: torch.Generator | None,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    variates: Variates = "independent",
) -> Tensor:
    """Noise ``[L, n, ...]`` for ``n`` draws."""
    if variates not in get_args(Variates):
        raise ValueError(f"variates is {variates!r}; choose one of {', '.join(get_args(Variates))}")
    layers, n, *rest = shape
    if n == 1 or variates == "independent":
        return torch.randn((layers, n, *rest), generator=generator, device=device, dtype=dtype)
    if variates == "antithetic":
        half = torch.randn((layers, -(-n // 2), *rest), generator=generator, device=device, dtype=dtype)
        return torch.stack([half, -half], dim=2).flatten(1, 2)[:, :n]
    return torch.special.ndtri(_latin_hypercube((layers, n, *rest), generator, device)).to(dtype)


def _latin_hypercube(shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Points of the open unit cube: of ``n`` along dimension 1, one in each of ``n`` equal parts, in random order."""
    order, place = (torch.rand(tuple(shape), generator=generator, device=device, dtype=torch.float64) for _ in range(2))
    edge = torch.finfo(torch.float64).eps
    return ((order.argsort(dim=1) + place) / shape[1]).clamp(edge, 1.0 - edge)


class KeptNoise:
    """Noise that lies in the same memory at every pass, in the order in which it is asked for."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._position = 0

    def rewind(self) -> None:
        """Begin a pass."""
        self._position = 0

    def next(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """The noise that is next in the pass; what it holds is :meth:`refill`'s affair."""
        if self._position == len(self._buffers):
            self._buffers.append(torch.randn(tuple(shape), device=device, dtype=dtype))
        self._position += 1
        return self._buffers[self._position - 1]

    def refill(self, generator: torch.Generator | None, variates: Variates) -> None:
        """The same noise as :func:`standard_normal` would give one after the other."""
        for buffer in self._buffers:
            source = buffer.device if generator is None else generator.device
            buffer.copy_(standard_normal(buffer.shape, generator, source, buffer.dtype, variates), non_blocking=True)
