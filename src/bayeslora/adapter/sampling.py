"""Which networks a prediction uses, and a context manager that puts them into use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from bayeslora.adapter.base import Holder, find_any_holder
from bayeslora.adapter.lean_layers import lean_predictions
from bayeslora.posterior.noise import Variates


@dataclass(frozen=True)
class Sampling:
    """Draws whose predictions are averaged. Equal instances give the same networks on every device, at any time.

    Attributes:
        samples: number of draws; 0 uses the posterior mean.
        seed: of their noise.
        layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the layers below use the mean.
        variates: how noise is arranged over the draws.
    """

    samples: int = 4
    seed: int = 0
    layers: str = "all"
    variates: Variates = "antithetic"

    def count(self, holder: Holder) -> int:
        """Actual number of draws: 0 where all would be equal, and every member of an ensemble."""
        return holder.draw_count(self.samples) if self.samples > 0 else 0

    def put_into_use(self, holder: Holder, *, fan_out: bool = False) -> int:
        """Use these draws, or the mean, until another call changes that; returns the number of networks, at least 1."""
        count = self.count(holder)
        if count == 0:
            holder.deterministic()
        else:
            holder.draw_from_seed(count, self.seed, variates=self.variates, layers=self.layers, fan_out=fan_out)
        return max(1, count)


MEAN = Sampling(samples=0)
"""The posterior mean."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block, and restore its mode after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def sampled(model: nn.Module, sampling: Sampling, *, fan_out: bool = False) -> Iterator[int]:
    """Put the model into evaluation mode and use these draws inside the block; restores everything after it.

    Yields the number of networks in use. With ``fan_out`` a batch is given once, and the model repeats it that often.
    """
    holder = find_any_holder(model)
    with evaluating(model), lean_predictions(model), holder.restoring():
        yield sampling.put_into_use(holder, fan_out=fan_out)
