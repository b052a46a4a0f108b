"""What training and prediction ask of the adapter in a model, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn

from bayeslora.posterior import KL
from bayeslora.posterior.noise import Variates

ATTRIBUTE = "weight_posterior"
"""Name under which a holder hangs in a model. It must not contain PEFT's prefix of our method."""


class Holder(nn.Module, ABC):
    """One module per model that decides which weights a forward pass uses: :class:`bayeslora.adapter.PosteriorHolder`
    for posteriors of ours, :class:`bayeslora.adapter.foreign.ForeignHolder` for what PEFT brings.

    Its buffers are what training remembers from step to step; they are saved with checkpoints.
    """

    @property
    @abstractmethod
    def layer_names(self) -> list[str]:
        """The adapted layers, by their paths from the module that the holder hangs on."""

    @abstractmethod
    def draw(
        self,
        n: int = 1,
        generator: torch.Generator | None = None,
        *,
        variates: Variates = "antithetic",
        layers: str = "all",
        fan_out: bool = False,
    ) -> None:
        """Draw ``n`` networks now and use them until told otherwise.

        Args:
            n: how many. The batch is ``n`` blocks of equal size, and block ``k`` is computed with draw ``k``.
            generator: makes the draws reproducible.
            variates: how noise is arranged over the draws.
            layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the mean is used below.
            fan_out: the batch is given once. The model repeats it where draws begin to differ, so that what is below is
                computed once, and returns ``n`` blocks.
        """

    def draw_from_seed(
        self, n: int, seed: int, *, variates: Variates = "antithetic", layers: str = "all", fan_out: bool = False
    ) -> None:
        """The same with noise from a seed: equal on every device, and whenever it is called."""
        self.draw(n, torch.Generator().manual_seed(seed), variates=variates, layers=layers, fan_out=fan_out)

    @property
    def fans_out(self) -> bool:
        """Whether the model repeats a batch by itself, once for each of the draws in use."""
        return False

    @abstractmethod
    def narrow(self, first: int, count: int) -> None:
        """Of the draws in use, use ``count`` from number ``first`` on."""

    def settle(self, root: nn.Module) -> None:
        """Work out what :meth:`draw` was told about layers. Forward passes do it; a model in parts must be told before."""

    @abstractmethod
    def deterministic(self) -> None:
        """Use the mean until told otherwise, in training too."""

    @abstractmethod
    def restoring(self) -> AbstractContextManager[None]:
        """On leaving the block, what is in use now is in use again."""

    @abstractmethod
    def draw_count(self, samples: int) -> int:
        """Draws that a prediction takes whose budget is ``samples``; 0 where all are the same and the mean will do."""

    @abstractmethod
    def kl(self) -> KL:
        """KL of what is in use, at the draws of the last forward pass if there were any."""

    def kl_share(self, parts: int, draws: int = 1) -> float:
        """What the KL of one of ``parts`` of a batch is multiplied by, so that over all of them it counts once.

        An amortised KL is a sum over tokens, averaged over the draws, and those have a part of the tokens each.
        """
        return 1.0 / parts

    def penalty(self) -> Tensor | None:
        """What training adds to the loss besides the KL, with its weight in it."""
        return None

    def aim(
        self, losses: Iterable[Callable[[], Tensor]], add_up: Callable[[Sequence[Tensor]], None] | None = None
    ) -> None:
        """Turn posteriors, before training, to where a loss falls fastest; nothing where there is nothing to turn.

        Args:
            losses: functions that run the model and give parts of the loss.
            add_up: replaces gradients by their sums over all processes, if there are several.
        """

    def after_step(self, step: int, steps: int) -> None:
        """Called after each of ``steps`` optimiser steps, counted from 1, while the gradients are still there."""

    def split_kinds(self) -> Mapping[str, Literal["kl", "both"]]:
        """Kinds of parameters that plain SGD moves where training is split (see :class:`bayeslora.posterior.Posterior`)."""
        return {}


def find_any_holder(model: nn.Module) -> Holder:
    """The holder of a model, also of one that transformers adapted without a ``PeftModel`` around it."""
    holders = [module for module in model.modules() if isinstance(module, Holder)]
    if len(holders) != 1:
        raise ValueError(f"expected a model with one bayeslora adapter or more, found {len(holders)} holders in it")
    return holders[0]
