"""Draws of training passes whose gradient has not been taken yet.

Between a training pass and its backward pass another one may come: of evaluation, or without gradients for a metric. Gradient
checkpointing then runs layers again in the backward pass, and these must get the draws of the training pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from bayeslora.adapter.draws import Draws


class _Pass:
    """A pass with fresh draws; lives as long as its graph. As a hook of a tensor it notes that the gradient was taken."""

    taken = False

    def __call__(self, gradient: Tensor) -> None:
        self.taken = True


class GradientDraws:
    """The draws of the last training pass with gradients, by adapter."""

    def __init__(self) -> None:
        self._draws: dict[str, Draws] = {}
        self._last: _Pass | None = None
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def begin(self, drawn: Mapping[str, Draws], random: bool) -> None:
        """Note the draws of a new pass, which may be ``random`` or always the same. Passes with the same draws count once."""
        known = self._draws and all(self._draws.get(name) is it for name, it in drawn.items())
        self._draws = dict(drawn)
        if known:
            return
        self._last = None
        made = [t for it in drawn.values() for t in (*it.factors.A, *it.factors.B) if t.grad_fn is not None]
        if random and made:
            self._last = _Pass()
            self._passes.add(self._last)
            made[0].register_hook(self._last)

    def replace(self, drawn: Mapping[str, Draws]) -> None:
        """Give the layers others for the same draws."""
        self._draws = dict(drawn)

    def tidy(self) -> None:
        """Let go of draws that no backward pass needs any more."""
        if self._last is not None and self._last.taken:
            self._draws = {}

    def waiting(self, adapter: str) -> Draws | None:
        """The draws of the last pass if its gradient has not been taken."""
        return self._draws.get(adapter) if self._last is not None and not self._last.taken else None

    def recall(self, adapter: str) -> Draws | None:
        """The draws for layers that are run again in a backward pass."""
        if sum(not it.taken for it in self._passes) > 1:
            raise RuntimeError(
                "gradient checkpointing runs layers again in the backward pass, and cannot tell which of several training "
                "passes with draws of their own these belong to: call backward() after each pass, or let all passes share "
                "their draws inside model.draws(n)"
            )
        return self._draws.get(adapter)


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1
