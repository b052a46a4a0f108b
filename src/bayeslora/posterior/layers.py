"""Which layers a posterior covers, and how equal shapes are stacked into one batch.

Notation used by every file of this package:

======== ==========================================================
``o, i`` output and input size of the adapted linear layer
``R``    LoRA rank; the factors are ``A [R, i]`` and ``B [o, R]``
``L``    layers of equal shape, stacked along the first dimension
``n``    draws, stacked along the second dimension
======== ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerShape:
    """One adapted linear layer: its name, its sizes and the rank of its update ``B A``."""

    name: str
    out_features: int
    in_features: int
    rank: int

    def __post_init__(self) -> None:
        for field in ("out_features", "in_features", "rank"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"layer {self.name!r}: {field} must be at least 1, got {value}")


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one shape. Layer ``names[k]`` is row ``k`` of every tensor stacked for the group."""

    names: tuple[str, ...]
    out_features: int
    in_features: int
    rank: int

    @property
    def key(self) -> str:
        """Suffix of the group's parameter names, such as ``4096x4096_r8``."""
        return f"{self.out_features}x{self.in_features}_r{self.rank}"

    @property
    def factor_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the two factors, ``A [R, i]`` and ``B [o, R]``."""
        return {"A": (self.rank, self.in_features), "B": (self.out_features, self.rank)}

    def __len__(self) -> int:
        return len(self.names)


def group_by_shape(layers: Iterable[LayerShape]) -> tuple[LayerGroup, ...]:
    """Stack layers of equal shape, in order of first appearance."""
    rows: dict[tuple[int, int, int], list[str]] = {}
    seen: set[str] = set()
    for layer in layers:
        if layer.name in seen:
            raise ValueError(f"layer {layer.name!r} is listed twice; every layer has one posterior")
        seen.add(layer.name)
        rows.setdefault((layer.out_features, layer.in_features, layer.rank), []).append(layer.name)
    if not rows:
        raise ValueError("no layers given; a posterior needs at least one layer")
    return tuple(LayerGroup(tuple(names), *shape) for shape, names in rows.items())


def layer_positions(groups: Sequence[LayerGroup]) -> dict[str, tuple[int, int]]:
    """Position of each layer: name -> (group index, row in the group)."""
    return {name: (index, row) for index, group in enumerate(groups) for row, name in enumerate(group.names)}


def lora_start(group: LayerGroup, generator: torch.Generator) -> dict[str, Tensor]:
    """LoRA's initial factors for all layers of a group."""
    shape_a, shape_b = ((len(group), *shape) for shape in group.factor_shapes.values())
    uniform = 2.0 * torch.rand(shape_a, generator=generator) - 1.0
    return {"A": uniform / group.in_features**0.5, "B": torch.zeros(shape_b)}


def trainable_rows(A: Tensor, B: Tensor, own: Tensor) -> Tensor:
    """``A [..., R, i]``, with rows of ``own`` where a row and its column of ``B [..., o, R]`` are both zero, as after padding to
    a higher rank: ``B A`` is the same, and without that neither would ever have a gradient."""
    dead = (A == 0).all(-1) & (B == 0).all(-2)
    return torch.where(dead.unsqueeze(-1), own, A)
