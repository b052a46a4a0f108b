"""Standard normal noise for ``n`` draws: independent, or arranged to reduce the error of an average over few draws.

Each arrangement keeps every single draw standard normal, so averages stay unbiased. Only independence between draws is
lost, and nothing here relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Variates = Literal["independent", "antithetic", "latin"]
"""Arrangement of the noise over several draws. ``antithetic``: pairs of opposite noise, so that odd terms cancel.
``latin``: a randomised Latin hypercube, whose draws fill the range of every coordinate evenly. (Sobol points would take
seconds to scramble for so many coordinates.)"""


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


class Noise:
    """Source of noise, passed through a posterior while it draws.

    Args:
        generator: makes the noise reproducible; may be on another device than the noise.
        device: where the noise is used.
        dtype: of Gaussian noise.
        variates: how Gaussian noise is arranged over the draws.
    """

    def __init__(
        self,
        generator: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        variates: Variates = "independent",
    ) -> None:
        self.generator, self.device, self.dtype, self.variates = generator, device, dtype, variates
        self._made_on = device if generator is None else generator.device

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal noise ``[L, n, ...]``."""
        return standard_normal(shape, self.generator, self._made_on, self.dtype, self.variates).to(self.device)

    def gaussian(self, mean: Tensor, sd: Tensor, n: int) -> Tensor:
        """``n`` draws ``[L, n, ...]`` of independent Gaussians with moments ``[L, ...]``."""
        noise = self.normal((mean.shape[0], n, *mean.shape[1:]))
        return torch.addcmul(mean.unsqueeze(1), sd.unsqueeze(1), noise)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Uniform noise in [0, 1), independent in every entry."""
        return torch.rand(tuple(shape), generator=self.generator, device=self._made_on).to(self.device)


class KeptNoise(Noise):
    """Gaussian noise in the same memory in every pass, in the order of requests."""

    def __init__(self, device: torch.device, dtype: torch.dtype, variates: Variates) -> None:
        super().__init__(None, device, dtype, variates)
        self._buffers: list[Tensor] = []
        self._position = 0

    def rewind(self) -> KeptNoise:
        """Start a pass."""
        self._position = 0
        return self

    def normal(self, shape: Sequence[int]) -> Tensor:
        """The next noise of the pass; :meth:`refill` sets its values."""
        if self._position == len(self._buffers):
            self._buffers.append(torch.randn(tuple(shape), device=self.device, dtype=self.dtype))
        self._position += 1
        return self._buffers[self._position - 1]

    def refill(self, generator: torch.Generator | None) -> None:
        """Set the values that a :class:`Noise` with this generator would give, in the same order."""
        source = Noise(generator, self.device, self.dtype, self.variates)
        for buffer in self._buffers:
            buffer.copy_(source.normal(buffer.shape), non_blocking=True)
