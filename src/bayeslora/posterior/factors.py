"""Weight draws of all layers, stacked by layer shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeslora.posterior.inner import Inner
from bayeslora.posterior.layers import LayerGroup, layer_positions


class LayerFactors(NamedTuple):
    """The factors of one layer: ``A [n, R, i]`` and ``B [n, o, R]``."""

    A: Tensor
    B: Tensor


@dataclass(frozen=True)
class Factors:
    """``n`` weight draws of every layer, stacked by layer shape.

    Index by layer name to get the factors of one layer; ``A[g]`` and ``B[g]`` hold those of a whole
    group as ``[L, n, R, i]`` and ``[L, n, o, R]``. Block ``k`` of a batch uses draw ``k``, the same
    index in every layer, so one draw is one coherent network.

    Groups in which all draws are equal may hold only one of them.

    ``latents`` holds what the posterior needs to evaluate its KL at this draw, or that KL. ``inners`` holds, for each of the
    first groups, the computation before ``B`` where it is more than ``A x``.
    """

    groups: tuple[LayerGroup, ...]
    A: tuple[Tensor, ...]
    B: tuple[Tensor, ...]
    latents: Any = None
    inners: tuple[Inner, ...] = ()

    @property
    def n(self) -> int:
        """Number of draws."""
        return max(stack.shape[1] for stack in self.A)

    @cached_property
    def _positions(self) -> dict[str, tuple[int, int]]:
        return layer_positions(self.groups)

    def __getitem__(self, name: str) -> LayerFactors:
        group, row = self._positions[name]
        return LayerFactors(self.A[group][row], self.B[group][row])

    def by_layer(self, dtype: torch.dtype | None = None) -> dict[str, LayerFactors]:
        """The factors of every layer by name, optionally in another precision.

        Same as indexing, but with a few operators for all layers. In the backward pass, indexing would write a gradient as
        large as the whole stack for each layer.
        """
        A, B = ([stack.to(dtype or stack.dtype).unbind(0) for stack in side] for side in (self.A, self.B))
        return {name: LayerFactors(A[group][row], B[group][row]) for name, (group, row) in self._positions.items()}

    def inner_by_layer(self, dtype: torch.dtype | None = None) -> dict[str, Inner]:
        """The computations before ``B`` that are more than ``A x``, by layer name; see :meth:`by_layer`."""
        return {
            name: own
            for group, inner in zip(self.groups, self.inners, strict=False)
            for name, own in zip(group.names, inner.unbind(len(group), dtype), strict=True)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def product(self, name: str) -> Tensor:
        """``B A`` of one layer, ``[n, o, i]``; the adapter applies the LoRA scale ``alpha / R``."""
        A, B = self[name]
        return B @ A

    def pick(self, first: int, count: int = 1) -> Factors:
        """A slice of the draws, one by default, without the latents of the KL."""

        def cut(stack: Tensor) -> Tensor:
            return stack[:, first : first + count] if stack.shape[1] > 1 else stack

        A, B = (tuple(map(cut, side)) for side in (self.A, self.B))
        return replace(self, A=A, B=B, latents=None, inners=tuple(inner.map(cut) for inner in self.inners))

    def detach(self) -> Factors:
        """The same draws, detached from the graph, without the latents of the KL."""
        return replace(
            self,
            A=tuple(a.detach() for a in self.A),
            B=tuple(b.detach() for b in self.B),
            latents=None,
            inners=tuple(inner.map(Tensor.detach) for inner in self.inners),
        )
