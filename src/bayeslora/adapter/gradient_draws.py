"""Draws of training passes, for the layers that gradient checkpointing runs again in the backward pass.

Between a training pass and its backward pass another one may come: of training, of evaluation, or without gradients for a
metric. The layers that are run again must get the draws of their own pass. Hooks on the output of a pass are the first to be
called in its backward pass, and say which one it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayeslora.adapter.draws import Draws


class _Pass:
    """A training pass; lives as long as the graph of its output. As a hook of the output it is told of the backward pass."""

    def __init__(self, owner: GradientDraws, draws: dict[str, Draws]) -> None:
        self._owner = weakref.ref(owner)
        self.draws = draws
        self.taken = False

    def __call__(self, gradient: Tensor) -> None:
        self.taken = True
        owner = self._owner()
        if owner is not None:
            owner.running = self.draws


class GradientDraws:
    """The draws of training passes with gradients, by adapter.

    Attributes:
        running: draws of the pass whose backward pass is running, or was the last to run.
    """

    def __init__(self) -> None:
        self.running: dict[str, Draws] | None = None
        self._draws: dict[str, Draws] = {}
        self._last: weakref.ref[_Pass] | None = None

    def begin(self, drawn: Mapping[str, Draws]) -> None:
        """Note the draws of a new pass."""
        self.running, self._draws, self._last = None, dict(drawn), None

    def end(self, output: Any) -> None:
        """Tie the draws of the pass to its output."""
        own = _Pass(self, self._draws)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(own)
                self._last = weakref.ref(own)

    def tidy(self) -> None:
        """Let go of draws that no backward pass needs any more."""
        self.running = None
        last = None if self._last is None else self._last()
        if last is None or last.taken:
            self._draws = {}

    def waiting(self, adapter: str) -> Draws | None:
        """The draws of the last pass if its gradient may still be taken."""
        last = None if self._last is None else self._last()
        return None if last is None or last.taken else last.draws.get(adapter)

    def recall(self, adapter: str) -> Draws | None:
        """The draws for a layer that is run again in a backward pass."""
        return (self._draws if self.running is None else self.running).get(adapter)


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output."""
    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    return [part for part in parts if isinstance(part, Tensor)]


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
