"""Which networks a prediction is made with, and a model that uses them for as long as a block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from bayeslora.adapter.base import Holder, find_any_holder
from bayeslora.posterior.noise import Variates


@dataclass(frozen=True)
class Sampling:
    """Draws whose predictions are averaged. Equal ones are the same networks on every device, whenever they are drawn.

    Attributes:
        samples: how many draws; 0 uses the posterior mean.
        seed: of their noise.
        layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the mean is used below.
        variates: how noise is arranged over the draws.
    """

    samples: int = 4
    seed: int = 0
    layers: str = "all"
    variates: Variates = "antithetic"

    def count(self, holder: Holder) -> int:
        """Draws that are really made: 0 where all would be the same, and all of an ensemble's members."""
        return holder.draw_count(self.samples) if self.samples > 0 else 0

    def put_into_use(self, holder: Holder, *, fan_out: bool = False) -> int:
        """Use these draws, or the mean, until told otherwise; returns the number of networks, which is at least 1."""
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
    """Inside the block the model is in evaluation mode; after it, in the mode it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def sampled(model: nn.Module, sampling: Sampling, *, fan_out: bool = False) -> Iterator[int]:
    """Inside the block the model is in evaluation mode and uses these draws; after it, all is as it was.

    Yields the number of networks in use. With ``fan_out`` a batch is given once, and the model makes it as many blocks.
    """
    holder = find_any_holder(model)
    with evaluating(model), holder.restoring():
        yield sampling.put_into_use(holder, fan_out=fan_out)
