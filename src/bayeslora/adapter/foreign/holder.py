"""Draws from PEFT's own adapters, whose layers sample by themselves, in the forward pass and in training only.

The holder wraps the forward pass of such a layer. For draws, it splits the batch into one block per draw, seeds torch's
random numbers for that draw and layer, and calls the layer as if in training; for the mean, as if in evaluation. Nothing else
of the layer changes, and neither does torch's global random state.

===============  ==================================================================
training         PEFT's behaviour: noise from torch's global random numbers
evaluation       PEFT's behaviour: the mean
:meth:`draw`     the seeds of that call, until another call changes that
===============  ==================================================================

A layer called twice with the same input gets the same noise twice. So gradients are right under gradient checkpointing,
and a prediction is determined by the seed and the batch of the question. Where noise belongs to weights (MonteCLoRA), a
draw is one network for all questions, as with our posteriors. Where it belongs to tokens (PVeRA), a prediction depends,
unlike with ours, on how questions are batched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import ATTRIBUTE, Holder
from bayeslora.errors import InputError
from bayeslora.posterior import KL
from bayeslora.posterior.hints import TrainingHints
from bayeslora.posterior.noise import Variates

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

Note = tuple[nn.Module, str, Tensor]
"""A buffer and its owner."""


class ForeignHolder(Holder):
    """Controls the sampling of one of PEFT's own adapters. It has no tensors, and is not saved.

    Args:
        model: the adapted model.
    """

    config_class: ClassVar[type]
    """Dataclass of the settings, validated at construction."""

    hints: ClassVar[TrainingHints] = TrainingHints()
    """How an optimiser treats its parameters; kinds are matched by a word in the name."""

    partial: ClassVar[bool] = False
    """Whether some layers may have a point estimate instead."""

    def __init__(self, model: PeftModel) -> None:
        super().__init__()
        self._layers: Mapping[str, nn.Module] = {
            name: module for name, module in model.named_modules() if self._adapts(module)
        }
        if not self._layers:
            raise ValueError("PEFT made no layer that samples")
        for number, layer in enumerate(self._layers.values()):
            layer.forward = partial(self._forward, number, layer, layer.forward)
        self._seeds: tuple[int, ...] | None = None  # one per draw; (): the mean; None: PEFT's behaviour

    @classmethod
    @abstractmethod
    def peft_config(
        cls,
        settings: Mapping[str, Any],
        *,
        rank: int,
        alpha: float,
        targets: Sequence[str],
        layers: Sequence[int] | None,
        seed: int,
    ) -> PeftConfig:
        """PEFT's configuration of the adapter."""

    @classmethod
    def adapt(cls, base: nn.Module, config: PeftConfig, seed: int) -> PeftModel:
        """Put the adapter on a base model, with initial values from the seed."""
        from peft import get_peft_model

        with seeded(seed, next(base.parameters()).device):
            model = get_peft_model(base, config)
        try:
            cls.attach(model)
        except ValueError:
            model.unload()
            raise
        return model

    @classmethod
    def attach(cls, model: PeftModel) -> None:
        """Add the holder to an adapted model, outside of the base model, so that :meth:`unload` returns that unchanged."""
        setattr(model, ATTRIBUTE, cls(model))

    @classmethod
    def kind(cls, name: str) -> str:
        """Kind of a parameter for the optimiser, by name (see :class:`bayeslora.posterior.Posterior`)."""
        return next((kind for word, kind in cls.hints.kinds.items() if word in name), "weights")

    # Interface for training and prediction ----------------------------------------------------------------------------

    @property
    def layer_names(self) -> list[str]:
        """The adapted layers, by their paths from the ``PeftModel``."""
        return list(self._layers)

    def draw(
        self,
        n: int = 1,
        generator: torch.Generator | None = None,
        *,
        variates: Variates = "antithetic",
        layers: str = "all",
        fan_out: bool = False,
    ) -> None:
        """Choose the seeds of ``n`` draws and use them until another call changes that.

        PEFT generates the noise, so ``variates`` has no effect, and batches are never repeated (:attr:`fans_out`).
        """
        if n < 1:
            raise ValueError(f"number of draws must be at least 1, got {n}")
        if layers != "all":
            raise InputError(f"draw_layers is {layers!r}, but adapters of PEFT's own draw in all layers; use 'all'")
        device = "cpu" if generator is None else generator.device
        self._seeds = tuple(torch.randint(2**62, (n,), generator=generator, device=device).tolist())

    def narrow(self, first: int, count: int) -> None:
        """Keep ``count`` of the draws in use, starting with number ``first``."""
        self._seeds = (self._seeds or ())[first : first + count]

    def deterministic(self) -> None:
        """Disable noise until another call changes that, in training too."""
        self._seeds = ()

    def restoring(self) -> AbstractContextManager[None]:
        """Context manager that restores the current draws, and the buffers that sampling changes, on exit."""
        return _Restoring(self)

    def draw_count(self, samples: int) -> int:
        """All draws of the budget: no two are equal."""
        return samples

    def kl(self) -> KL:
        """No terms: the regularisation of PEFT's own adapters, if any, is in their penalty."""
        return KL()

    # One layer --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _adapts(self, module: nn.Module) -> bool:
        """Whether a module is a layer of the adapter."""

    def _notes(self) -> list[Note]:
        """Buffers in which layers record their samples; most have none."""
        return []

    def _forward(self, number: int, layer: nn.Module, forward: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer's own forward pass, once per draw on its block of the batch."""
        if self._seeds is None:
            return forward(x, *args, **kwargs)
        if not self._seeds:
            with _as_if(layer, training=False):
                return forward(x, *args, **kwargs)
        if x.shape[0] % len(self._seeds):
            raise ValueError(
                f"with {len(self._seeds)} draws in use the batch must consist of {len(self._seeds)} blocks of equal "
                f"size, got a batch of {x.shape[0]}"
            )
        outputs = []
        for seed, block in zip(self._seeds, x.chunk(len(self._seeds)), strict=True):
            with seeded(seed + number, x.device), _as_if(layer, training=True):
                outputs.append(forward(block, *args, **kwargs))
        return torch.cat(outputs)


class _Restoring(AbstractContextManager[None]):
    """A plain object, like that of :class:`bayeslora.adapter.PosteriorHolder`: without being entered, it changes
    nothing."""

    def __init__(self, holder: ForeignHolder) -> None:
        self._holder, self._seeds, self._notes = holder, holder._seeds, holder._notes()

    def __exit__(self, *exc: object) -> None:
        self._holder._seeds = self._seeds
        for module, name, value in self._notes:
            setattr(module, name, value)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers inside the block, and restore their state after it.

    Only those of the CPU and of the device: ``torch.manual_seed`` would seed all devices, and takes a hundred times as long.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _as_if(layer: nn.Module, *, training: bool) -> Iterator[None]:
    """Put the layer, but not the modules in it (dropout), into training or evaluation mode inside the block."""
    kept, layer.training = layer.training, training
    try:
        yield
    finally:
        layer.training = kept
