"""The factors that the layers of a model use, and what to draw next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from bayeslora.adapter.draw_expansion import DrawExpansion
from bayeslora.posterior import Factors, LayerFactors, Posterior
from bayeslora.posterior.inner import Inner


@dataclass
class Draws:
    """The factors in use, with a fingerprint that shows whether the posterior has changed since."""

    factors: Factors
    fingerprint: tuple[Any, ...]
    layers: Mapping[str, LayerFactors]
    inners: Mapping[str, Inner]

    @property
    def n(self) -> int:
        """Number of draws."""
        return max(A.shape[0] for A, _ in self.layers.values())

    @property
    def differing(self) -> list[str]:
        """Layers in which the draws may differ."""
        return [name for name, (A, _) in self.layers.items() if A.shape[0] > 1]

    def pick(self, first: int, count: int) -> Draws:
        """A slice of the draws."""

        def cut(tensor: Tensor) -> Tensor:
            return tensor[first : first + count] if tensor.shape[0] > 1 else tensor

        return replace(self.map(cut), factors=self.factors.pick(first, count))

    def map(self, function: Callable[[Tensor], Tensor]) -> Draws:
        """Apply a function to every tensor that the layers get."""
        layers = {name: LayerFactors(function(A), function(B)) for name, (A, B) in self.layers.items()}
        return replace(self, layers=layers, inners={name: inner.map(function) for name, inner in self.inners.items()})

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors that the layers get, in the order of :meth:`map`."""
        for pair in self.layers.values():
            yield from pair
        for inner in self.inners.values():
            yield from inner.tensors


@dataclass(eq=False)
class Mode:
    """What a forward pass uses; see the table in :mod:`bayeslora.adapter.holder`."""

    kind: Literal["automatic", "draws", "mean"] = "automatic"
    held: dict[str, Draws] = field(default_factory=dict)
    layers: str = "all"
    fan_out: bool = False
    expansion: DrawExpansion | None = None
    settled: bool = False


def fingerprint(posterior: Posterior) -> tuple[Any, ...]:
    """Changes whenever the posterior is trained, loaded, moved, cast or scaled."""
    tensors = (*posterior.parameters(), *posterior.buffers())
    return (posterior.scale, *((t.data_ptr(), _version(t), t.device, t.dtype) for t in tensors))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
