"""Where a model's factors come from: draws and means of its posteriors, and what is cached of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.draws import Draws, fingerprint
from bayeslora.posterior import Factors, Posterior
from bayeslora.posterior.capture import Capture
from bayeslora.posterior.noise import Variates


class FactorSource:
    """Draws from posteriors, and computes their means.

    Args:
        posteriors: by adapter.

    Attributes:
        precision: dtype of the activations, once it is known.
    """

    def __init__(self, posteriors: nn.ModuleDict) -> None:
        self._posteriors = posteriors
        self.precision: torch.dtype | None = None
        self._seed: int | None = None
        self._generator: torch.Generator | None = None
        self._means: dict[str, Draws] = {}
        self._captures: dict[str, Capture] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Exclude what is cached, which cannot be copied."""
        return {**self.__dict__, "_generator": None, "_means": {}, "_captures": {}}

    def posterior(self, name: str) -> Posterior:
        """The posterior of one adapter."""
        posterior = self._posteriors[name]
        assert isinstance(posterior, Posterior)
        return posterior

    def seed(self, seed: int) -> None:
        """Draw from a separate generator with this seed from now on, instead of the global one."""
        self._seed, self._generator = seed, None

    @property
    def generator(self) -> torch.Generator | None:
        """The separate generator; ``None`` without :meth:`seed`."""
        if self._seed is not None and self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed)
        return self._generator

    def draw(self, name: str, n: int, generator: torch.Generator | None, variates: Variates) -> Factors:
        """Draw from the posterior of one adapter."""
        posterior = self._in_memory(name)
        if name not in self._captures or self._captures[name].posterior is not posterior:
            self._captures[name] = Capture(posterior)
        return self._captures[name].draw(n, generator, variates)

    def mean(self, name: str) -> Draws:
        """The mean, cached while the posterior does not change; with gradients it is recomputed."""
        posterior = self._in_memory(name)
        if torch.is_grad_enabled() and any(p.requires_grad for p in posterior.parameters()):
            return self.wrap(name, posterior.mean())
        kept = self._means.get(name)
        if kept is None or not self.is_current(name, kept):
            with torch.inference_mode(False), torch.no_grad():  # the cache may also be used with gradients
                kept = self._means[name] = self.wrap(name, posterior.mean())
        return kept

    def wrap(self, name: str, factors: Factors) -> Draws:
        """Factors as layers use them, in the precision of the activations."""
        layers = factors.by_layer(self.precision)
        return Draws(factors, fingerprint(self.posterior(name)), layers, factors.inner_by_layer(self.precision))

    def is_current(self, name: str, drawn: Draws) -> bool:
        """Whether the posterior has not changed since."""
        return drawn.fingerprint == fingerprint(self.posterior(name))

    def forget(self, name: str) -> None:
        """Drop what is cached of an adapter."""
        self._means.pop(name, None)
        self._captures.pop(name, None)

    def _in_memory(self, name: str) -> Posterior:
        """The posterior of one adapter, unless its values are elsewhere: accelerate brings them for no call of ours."""
        posterior = self.posterior(name)
        if next(posterior.parameters()).is_meta:
            raise RuntimeError(
                f"the values of adapter {name!r} are not in memory: if a device_map has offloaded them, give one that has "
                f"'base_model.model.{ATTRIBUTE}' on a device"
            )
        return posterior
