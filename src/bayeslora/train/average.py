"""A running average of what is trained: where single steps jump about, their average lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Average:
    """Parameters averaged over the steps, the last ones weighing most.

    Args:
        parameters: those that are trained, by name.
        share: how much of the average a step leaves as it was. The first steps leave less, so that where training began
            is soon forgotten.
    """

    def __init__(self, parameters: Mapping[str, Tensor], share: float) -> None:
        self.share = share
        self._trained = dict(parameters)
        self._kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The average itself, under names of its own, for checkpoints."""
        return {f"average.{name}": value for name, value in self._kept.items()}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the parameters after so many steps."""
        share = min(self.share, (step - 1) / (step + 8))
        torch._foreach_lerp_(list(self._kept.values()), list(self._trained.values()), 1.0 - share)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block the parameters are those of the average."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def keep(self) -> None:
        """Leave the parameters with those of the average."""
        for name, parameter in self._trained.items():
            parameter.copy_(self._kept[name])

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._trained.items():
            trained = parameter.detach().clone()
            parameter.copy_(self._kept[name])
            self._kept[name].copy_(trained)
