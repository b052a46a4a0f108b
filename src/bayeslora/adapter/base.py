"""The interface between training or prediction and the adapter in a model, ours or PEFT's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn

from bayeslora.posterior import KL
from bayeslora.posterior.noise import Variates

AddUp = Callable[[Sequence[Tensor]], None]
"""Replaces tensors by their sums over all processes."""

ATTRIBUTE = "weight_posterior"
"""Attribute of a model that refers to its holder. It must not contain PEFT's prefix of our method."""


class Holder(nn.Module, ABC):
    """Decides which weights a forward pass uses. There is one per model: :class:`bayeslora.adapter.PosteriorHolder` for our
    posteriors, :class:`bayeslora.adapter.foreign.ForeignHolder` for PEFT's own adapters.

    Its buffers are training state, which is saved with checkpoints.

    Attributes:
        averages: whether what the model returns is averaged over the draws, see :func:`bayeslora.predict.mc.averaging`.
    """

    averages: bool = False

    @property
    @abstractmethod
    def layer_names(self) -> list[str]:
        """The adapted layers, by their paths from the module that has the holder."""

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
        """Draw ``n`` networks now and use them until another call changes that.

        Args:
            n: number of draws. The batch is ``n`` blocks of equal size, and block ``k`` is computed with draw ``k``.
            generator: makes the draws reproducible.
            variates: how noise is arranged over the draws.
            layers: those in which draws differ, ``all``, ``last:K`` or a fraction; the layers below use the mean.
            fan_out: the batch is given once. The model repeats it where draws begin to differ, so that the layers below are
                computed once, and returns ``n`` blocks.
        """

    def draw_from_seed(
        self, n: int, seed: int, *, variates: Variates = "antithetic", layers: str = "all", fan_out: bool = False
    ) -> None:
        """Draw with noise from a seed: equal on every device and in every call."""
        self.draw(n, torch.Generator().manual_seed(seed), variates=variates, layers=layers, fan_out=fan_out)

    @property
    def fans_out(self) -> bool:
        """Whether the model itself repeats a batch, once for each of the draws in use."""
        return False

    @abstractmethod
    def narrow(self, first: int, count: int) -> None:
        """Keep ``count`` of the draws in use, starting with number ``first``."""

    def settle(self, root: nn.Module) -> None:
        """Apply the ``layers`` and ``fan_out`` of :meth:`draw`. Forward passes do so; a model run in parts must call it first."""

    @abstractmethod
    def deterministic(self) -> None:
        """Use the mean until another call changes that, in training too."""

    @abstractmethod
    def restoring(self) -> AbstractContextManager[None]:
        """Context manager that restores the current draws on exit."""

    @abstractmethod
    def draw_count(self, samples: int) -> int:
        """Number of draws for a prediction with a budget of ``samples``; 0 where all are equal and the mean suffices."""

    @abstractmethod
    def kl(self) -> KL:
        """KL of the adapters in use, at the draws of the last forward pass if there were any."""

    def kl_share(self, parts: int, draws: int = 1) -> float:
        """Factor of the KL in one of ``parts`` of a batch, so that it counts once over all of them.

        An amortised KL is a sum over tokens, averaged over the draws, each of which has a part of the tokens.
        """
        return 1.0 / parts

    def penalty(self) -> Tensor | None:
        """Term that training adds to the loss besides the KL, weight included."""
        return None

    def aim(self, losses: Iterable[Callable[[], Tensor]], add_up: AddUp | None = None) -> None:
        """Choose, before training, the directions in which a loss falls fastest; no effect for most posteriors.

        Args:
            losses: functions that run the model and return parts of the loss.
            add_up: replaces gradients by their sums over all processes, if there are several.
        """

    def after_step(self, step: int, steps: int) -> None:
        """Called after each of ``steps`` optimiser steps, counted from 1, while the gradients are still there."""

    def component_parameters(self) -> list[Tensor]:
        """Parameters ``[L, K, ...]`` of the components of a mixture that is trained; none where there is only one."""
        return []

    def split_kinds(self) -> Mapping[str, Literal["kl", "both"]]:
        """Kinds of parameters that plain SGD updates where training is split (see :class:`bayeslora.posterior.Posterior`)."""
        return {}


def find_any_holder(model: nn.Module) -> Holder:
    """The holder of a model, also if transformers adapted it without a ``PeftModel`` around it."""
    holders = [module for module in model.modules() if isinstance(module, Holder)]
    if not holders:
        raise ValueError(
            "the model has no adapter of bayeslora; make one with get_peft_model(model, BayesLoraConfig()), or give the trainer "
            "peft_config=BayesLoraConfig()"
        )
    if len(holders) > 1:
        raise ValueError(f"expected one model with adapters of bayeslora, found {len(holders)} in it; give one of them")
    return holders[0]
