"""Averaging over draws. Every prediction of the library goes through this one function, or its form for one draw at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import ATTRIBUTE, find_any_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError

Observer = Callable[[Tensor], None]
"""Told the log-probabilities ``[n, B, T, vocabulary]`` of all draws, before they are averaged."""


def average_draws(log_probabilities: Tensor) -> Tensor:
    """Logarithm of the mean over draws (first dimension) of *probabilities*, never of logits.

    Averaged logits are a sharper predictor that ignores how far the draws disagree.
    """
    return torch.logsumexp(log_probabilities, dim=0) - math.log(log_probabilities.shape[0])


class RunningAverage:
    """The same for draws that come one by one, where all of them at once would be too large: one tensor is kept."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._draws = 0

    def add(self, log_probabilities: Tensor) -> None:
        """The next draw; the tensor is taken over."""
        if self._sum is None:
            self._sum = log_probabilities
        else:
            torch.logaddexp(self._sum, log_probabilities, out=self._sum)
        self._draws += 1

    def result(self) -> Tensor:
        """Logarithm of the mean of the probabilities so far."""
        if self._sum is None:
            raise ValueError("there are no draws to average; add one")
        return self._sum - math.log(self._draws) if self._draws > 1 else self._sum


T = TypeVar("T")


class Averaging:
    """A model's answering with averages, which can be set aside for a while."""

    def __init__(self, device: torch.device) -> None:
        self.active = True
        self._devices = [device] if device.type == "cuda" else []

    def while_set_aside(self, work: Callable[[T], None]) -> Callable[[T], None]:
        """The same work, done while the model answers as it does without averaging, and with random numbers of its own.

        What the work makes the model use (see :class:`bayeslora.adapter.base.Holder`) it must give back.
        """

        def apart(given: T) -> None:
            self.active = False
            try:
                with torch.random.fork_rng(self._devices):
                    work(given)
            finally:
                self.active = True

        return apart


@contextmanager
def posterior_predictive(
    model: nn.Module, samples: int = 4, seed: int = 0, *, layers: str = "all", observe: Observer | None = None
) -> Iterator[Averaging]:
    """Inside the block the model answers with the average of its draws: one row for each that it is given, with the
    logarithms of averaged probabilities as logits.

    Whatever reads the next token's distribution off a model then works with the posterior predictive: ``generate`` of
    transformers with greedy search, sampling, stop strings, streaming. The draws are made once and stay the same for the
    whole block, so a sequence is written by the same networks from its first token to its last, each with a key-value
    cache of its own above the first layer in which they differ.

    Args:
        model: with an adapter.
        samples: draws that are averaged; 0 uses the posterior mean.
        seed: of the draws.
        layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the mean is used below.
        observe: told what each draw says, before it is averaged.
    """
    holder = find_any_holder(model)
    with holder.restoring():
        n = Sampling(samples, seed, layers).put_into_use(holder, fan_out=True)
        with averaging(model, n, observe) as state:
            yield state


@contextmanager
def averaging(model: nn.Module, n: int, observe: Observer | None = None) -> Iterator[Averaging]:
    """Inside the block a model that ``n`` draws fan out in averages them; a single one is left as it is, to the bit."""
    if n > 1 and not find_any_holder(model).fans_out:
        raise InputError("adapters of PEFT's own cannot average their draws while writing; use samples 0 or 1")
    root = next(module for module in model.modules() if ATTRIBUTE in module._modules)
    state = Averaging(next(model.parameters()).device)

    def average(root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not state.active or (observe is None and n == 1):
            return None
        log_probabilities = output.logits.unflatten(0, (n, -1)).float().log_softmax(-1)
        if observe is not None:
            observe(log_probabilities)
        if n > 1:
            output.logits = average_draws(log_probabilities)
        return output

    handle = root.register_forward_hook(average)
    try:
        yield state
    finally:
        handle.remove()
