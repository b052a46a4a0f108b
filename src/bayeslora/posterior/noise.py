"""Standard normal noise for ``n`` draws: independent, or arranged to reduce the error of an average over few draws.

Each arrangement keeps every single draw standard normal, so averages stay unbiased. Only independence between draws is
lost, and nothing here relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from bayeslora.posterior.philox import Philox, uniforms

Variates = Literal["independent", "antithetic", "latin"]
"""Arrangement of the noise over several draws. ``antithetic``: pairs of opposite noise, so that odd terms cancel.
``latin``: a randomised Latin hypercube, whose draws fill the range of every coordinate evenly. (Sobol points would take
seconds to scramble for so many coordinates.)"""


def seed_of(generator: torch.Generator | None) -> int:
    """The next 63 random bits of a generator, or of torch's own for CPUs; a generator of a GPU makes the host wait."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device).cpu().numpy())


class Noise:
    """Source of noise, passed through a posterior while it draws.

    Noise is keyed by the seed, the number of the request and the draw. It is the same on every device and, but for ``latin``, a
    draw does not depend on the number of draws.

    Args:
        generator: what the seed is taken from, at the first request; by default torch's own for CPUs.
        device: where the noise is made and used.
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
        if variates not in get_args(Variates):
            raise ValueError(f"variates is {variates!r}; choose one of {', '.join(get_args(Variates))}")
        self.device, self.dtype, self.variates = device, dtype, variates
        self._generator = generator

    @cached_property
    def _seed(self) -> int:
        return seed_of(self._generator)

    @cached_property
    def _numbers(self) -> Philox:
        return Philox(self._seed, self.device)

    @cached_property
    def _orders(self) -> Philox:
        return Philox(self._seed, torch.device("cpu"), stream=1)

    def restart(self, generator: torch.Generator | None) -> None:
        """Begin again with another seed. A captured graph uses it in its next replay."""
        self._numbers.restart(seed_of(generator))

    def rewind(self) -> Noise:
        """Begin again with the same seed."""
        self._numbers.rewind()
        return self

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal noise ``[L, n, ...]``."""
        layers, n, *rest = shape
        if n == 1 or self.variates == "independent":
            drawn = self._numbers.next(layers, n, math.prod(rest))
        elif self.variates == "antithetic":
            half = self._numbers.next(layers, -(-n // 2), math.prod(rest))
            drawn = torch.stack([half, -half], dim=2).flatten(1, 2)[:, :n]
        else:
            drawn = torch.special.ndtri(self._latin_hypercube(layers, n, math.prod(rest)))
        return drawn.to(self.dtype).reshape(tuple(shape))

    def gaussian(self, mean: Tensor, sd: Tensor, n: int) -> Tensor:
        """``n`` draws ``[L, n, ...]`` of independent Gaussians with moments ``[L, ...]``."""
        noise = self.normal((mean.shape[0], n, *mean.shape[1:]))
        return torch.addcmul(mean.unsqueeze(1), sd.unsqueeze(1), noise)

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Uniform noise in [0, 1), ``[L, n, ...]``, independent in every entry."""
        layers, n, *rest = shape
        return self._numbers.next(layers, n, math.prod(rest), uniforms).reshape(tuple(shape))

    def order(self, count: int) -> list[int]:
        """The numbers below ``count`` in random order."""
        return [int(place) for place in self._orders.next(1, 1, count).flatten().numpy().argsort()]

    def _latin_hypercube(self, layers: int, n: int, size: int) -> Tensor:
        """Points of the open unit cube: of ``n`` along dimension 1, one in each of ``n`` equal parts, in random order."""
        order, place = (self._numbers.next(layers, n, size, uniforms) for _ in range(2))
        edge = torch.finfo(torch.float64).eps
        return ((order.argsort(dim=1) + place.double()) / n).clamp(edge, 1.0 - edge)
