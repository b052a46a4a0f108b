"""Repeats a batch at the first layer in which draws differ: below it, all draws compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.layer_ranges import upper_layers

_LAYER = re.compile(r"^(?P<list>.+?)\.(?P<index>\d+)\.")


@dataclass(frozen=True)
class Stack:
    """The list of layers that a model runs in sequence.

    Attributes:
        path: of the list in the model.
        layers: the list.
    """

    path: str
    layers: nn.ModuleList

    @classmethod
    def find(cls, root: nn.Module, names: Iterable[str]) -> Stack | None:
        """The one list that contains the named modules; ``None`` if there is none, or more than one."""
        paths = {match["list"] for name in names if (match := _LAYER.match(name))}
        if len(paths) != 1:
            return None
        path = paths.pop()
        layers = root.get_submodule(path)
        return cls(path, layers) if isinstance(layers, nn.ModuleList) else None

    def index(self, name: str) -> int:
        """Index of the layer that contains a module; modules outside, such as the output head, come after all."""
        match = _LAYER.match(name)
        return int(match["index"]) if match else len(self.layers)

    def below(self, layers: str, names: Iterable[str]) -> set[str]:
        """Those of the named modules that are below the upper ``layers``: all, ``last:K`` or a fraction."""
        cut = len(self.layers) - upper_layers(layers, len(self.layers), "draw_layers")
        return {name for name in names if self.index(name) < cut}


MayBegin = Callable[[tuple[nn.Module, ...]], bool]
"""Whether a batch may be repeated at the first of these modules."""


@dataclass
class DrawExpansion:
    """Repeats a batch, one block for each of ``n`` draws, where it enters the first of some modules.

    Other arguments with one row per example (masks, rotary embeddings) are repeated as well. A key-value cache needs nothing:
    every layer keeps its own rows.

    Attributes:
        modules: those in which draws differ, in the order of execution; or the model itself.
        n: number of draws.
    """

    modules: tuple[nn.Module, ...]
    n: int
    _rows: int = 0
    _repeated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def before(cls, root: nn.Module, differing: Sequence[str], n: int, may_begin: MayBegin) -> DrawExpansion:
        """Repeats before the first of the modules in which draws differ: an upper layer, the output head, or the model itself.

        Below the lowest layer there is nothing to save, and every model may be given more rows.
        """
        upper = cls._above_the_rest(root, differing)
        return cls(upper if upper and may_begin(upper) else (root,), n)

    @staticmethod
    def _above_the_rest(root: nn.Module, differing: Sequence[str]) -> tuple[nn.Module, ...]:
        """The layers from the lowest in which draws differ, or the only such module; empty if nothing is below."""
        stack = Stack.find(root, differing)
        if stack is None:
            return (root.get_submodule(differing[0]),) if len(differing) == 1 else ()
        first = min(map(stack.index, differing))
        return tuple(stack.layers)[first:] if first > 0 else ()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the modules."""
        position = next((k for k, own in enumerate(self.modules) if own is module), None)
        if position is None:
            return None
        if position == 0:
            self._repeated.clear()
            self._rows = batch_rows(args, kwargs)
        given = tuple(map(self._repeat, args)), {name: self._repeat(value) for name, value in kwargs.items()}
        if position == len(self.modules) - 1:
            self._repeated.clear()
        return given

    def _repeat(self, value: Any) -> Any:
        """Repeat tensors with as many rows as the original batch; activations of later modules are repeated already."""
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == self._rows:
            kept = self._repeated.get(id(value))
            if kept is None:  # also keep the original, or its id could be reused
                kept = self._repeated[id(value)] = value, torch.cat([value] * self.n)
            return kept[1]
        if type(value) is dict:  # masks by kind of layer
            return {name: self._repeat(part) for name, part in value.items()}
        return tuple(map(self._repeat, value)) if isinstance(value, tuple) else value


def batch_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Number of rows of a batch, the size of its tokens or else of the first tensor that a model is given; 1 if there is none."""
    given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args, *kwargs.values())
    return next((len(it) for it in given if isinstance(it, Tensor) and it.ndim > 1), 1)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
