"""Random numbers from a counter: Philox 4×32-10, and Gaussian noise made of it.

A number is a function of its key and its position alone. So it is made on the device that uses it, inside a CUDA graph as well,
and draw ``i`` does not depend on how many draws there are. The integers are exact everywhere. The noise uses only operations
that IEEE 754 rounds exactly (``+ − × ÷ √``), each in a kernel of its own, so that a CPU and a GPU give the same bits; ``log`` and
``cos`` of a library would differ in the last digit.

The functions take NumPy arrays as well as tensors: on a CPU NumPy needs a fraction of the time for small arrays.

Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LANES = 4

Array = Any
"""A NumPy array of ``uint64`` or a tensor of ``int64``."""
Make = Callable[[Array, Array, Any], Sequence[Array]]
"""Turns words into numbers, two stacks into two, with the functions of ``numpy`` or ``torch``."""

_CHUNKS = {"cpu": 2**13}
_LARGE_CHUNK = 2**20
"""Counters at a time; on a CPU so few that they stay in its cache."""


def philox(even: Array, odd: Array, multipliers: Array, round_keys: Sequence[Array]) -> tuple[Array, Array]:
    """Four words of 32 random bits from the four words of each counter.

    Args:
        even: words 0 and 2 of the counters, ``[2, ...]``.
        odd: words 1 and 3.
        multipliers: the constants of the method, ``[2, 1, ...]``.
        round_keys: the key of every round, ``[2, 1, ...]``.
    """
    for key in round_keys:
        products = even * multipliers
        even, odd = _swapped(products >> 32) & WORD ^ odd ^ key, _swapped(products & WORD)
    return even, odd


def _swapped(pair: Array) -> Array:
    return pair.flip(0) if isinstance(pair, Tensor) else pair[::-1]


def key_schedule(seed: int) -> list[tuple[int, int]]:
    """The keys of the rounds for a seed of 64 bits."""
    low, high = seed & WORD, seed >> 32 & WORD
    return [((low + turn * WEYL[0]) & WORD, (high + turn * WEYL[1]) & WORD) for turn in range(ROUNDS)]


def normals(first: Array, second: Array, xp: Any) -> tuple[Array, Array]:
    """Standard normal numbers, float32 (Box and Muller).

    One word gives a radius. The other gives an angle of at most an eighth of a turn to either side, a reflection and a sign.
    """
    radius = xp.sqrt(_log(_cast(first + 1, xp.float32) * 2.0**-32, xp) * -2.0)
    radius = xp.where(second >> 31 == 1, -radius, radius)
    angle = (_cast(second & (2**30 - 1), xp.float32) - 2.0**29) * (math.pi * 2.0**-31)
    cosine, sine = _cos_sin(angle)
    reflected = second >> 30 & 1 == 1
    return radius * xp.where(reflected, sine, cosine), radius * xp.where(reflected, cosine, sine)


def uniforms(first: Array, second: Array, xp: Any) -> tuple[Array, Array]:
    """Uniform numbers in [0, 1), float32."""
    return _cast(first >> 8, xp.float32) * 2.0**-24, _cast(second >> 8, xp.float32) * 2.0**-24


def _log(x: Array, xp: Any) -> Array:
    """Natural logarithm of positive float32 numbers: ``x = m 2ᵉ`` with ``m`` around 1, and ``log m = 2 artanh((m−1)/(m+1))``."""
    root_half = 0x3F3504F3  # bits of √½
    bits = x.view(xp.int32) - root_half
    exponent = _cast(bits >> 23, xp.float32)
    m = ((bits & 0x7FFFFF) + root_half).view(xp.float32)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = square * (2 / 9) + 2 / 7
    for term in (2 / 5, 2 / 3):
        series = series * square + term
    return exponent * math.log(2.0) + (series * square * s + s * 2.0)


def _cos_sin(x: Array) -> tuple[Array, Array]:
    """Cosine and sine of angles up to an eighth of a turn, by their series."""
    square = x * x
    cosine, sine = square * (1 / 40320) + -1 / 720, square * (1 / 362880) + -1 / 5040
    for even, odd in ((1 / 24, 1 / 120), (-1 / 2, -1 / 6), (1.0, 1.0)):
        cosine, sine = cosine * square + even, sine * square + odd
    return cosine, sine * x


def _cast(x: Array, dtype: Any) -> Array:
    """Numbers of below 63 bits in another type."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    return (x.view(np.int64) if x.dtype == np.uint64 else x).astype(dtype)


class Philox:
    """Numbers of one seed.

    Args:
        seed: 64 bits.
        device: where the numbers are made.
        stream: numbers of different streams have nothing in common.
    """

    def __init__(self, seed: int, device: torch.device, stream: int = 0) -> None:
        self.device, self.stream = device, stream
        self._key = None if device.type == "cpu" else torch.empty(2, dtype=torch.int64, device=device)
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin again with another seed. It is written to the memory that captured graphs read; the host does not wait."""
        self.seed = seed
        if self._key is not None:
            self._key[0].fill_(seed & WORD)
            self._key[1].fill_(seed >> 32 & WORD)
        self.rewind()

    def rewind(self) -> None:
        """Begin again."""
        self.request = 0

    def next(self, layers: int, n: int, size: int, make: Make = normals) -> Tensor:
        """The next numbers, ``[layers, n, size]``: entry ``(layer, draw, place)`` depends on ``size`` but not on the rest."""
        blocks = -(-size // LANES)
        filled = self._filled(layers, n, blocks, make, np if self._key is None else torch)
        self.request += 1
        whole = filled if isinstance(filled, Tensor) else torch.from_numpy(filled)
        return whole.view(layers, n, LANES * blocks)[..., :size]

    def _filled(self, layers: int, n: int, blocks: int, make: Make, xp: Any) -> Array:
        """Numbers ``[layers · n, 2, 2, blocks]``, made chunk by chunk."""
        place = {} if xp is np else {"device": self.device}
        multipliers, round_keys = _host_constants(self.seed) if self._key is None else _device_constants(self._key)
        out = xp.empty((layers * n, 2, 2, blocks), dtype=xp.float32, **place)
        chunk = _CHUNKS.get(self.device.type, _LARGE_CHUNK)
        height, width = max(1, chunk // max(1, blocks)), max(1, min(chunk, blocks))
        for top, left in product(range(0, layers * n, height), range(0, blocks, width)):
            part = out[top : top + height, ..., left : left + width]
            rows, columns = part.shape[0], part.shape[-1]
            even, odd = (xp.empty((2, rows, columns), dtype=multipliers.dtype, **place) for _ in range(2))
            row = xp.arange(top, top + rows, dtype=multipliers.dtype, **place)[:, None]
            column = xp.arange(left, left + columns, dtype=multipliers.dtype, **place)
            even[0], odd[0], even[1], odd[1] = row // n * blocks + column, row % n, self.request, self.stream
            for half, numbers in enumerate(make(*philox(even, odd, multipliers, round_keys), xp)):
                part[:, half] = numbers.swapaxes(0, 1)
        return out


def _device_constants(key: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    multipliers, weyl = _method_constants(key.device)
    return multipliers, ((key + weyl) & WORD)[..., None, None].unbind()


def _host_constants(seed: int) -> tuple[Array, Sequence[Array]]:
    return np.array(MULTIPLIERS, np.uint64)[:, None, None], list(
        np.array(key_schedule(seed), np.uint64)[..., None, None]
    )


@lru_cache(maxsize=16)
def _method_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The multipliers ``[2, 1, 1]``, and what each round adds to the key, ``[10, 2]``."""
    with torch.inference_mode(False):
        return torch.tensor(MULTIPLIERS, device=device)[:, None, None], torch.tensor(key_schedule(0), device=device)
