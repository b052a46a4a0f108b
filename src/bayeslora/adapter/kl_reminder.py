"""Reminds people who train an adapter with a loss that lacks its KL, as trainers do that do not know of it."""

from __future__ import annotations

import warnings
from collections import Counter

from bayeslora.posterior import Posterior

PASSES = 100
"""Passes of training without the KL after which people are told: more than any accumulation of gradients takes."""


class KLReminder:
    """Counts passes of training since the KL was last used, by adapter."""

    def __init__(self) -> None:
        self._passes: Counter[str] = Counter()

    def used(self) -> None:
        """The KL has been used."""
        self._passes.clear()

    def trained(self, name: str, posterior: Posterior) -> None:
        """A pass of training has begun; warns once if none of the last ones used the KL."""
        self._passes[name] += 1
        if self._passes[name] == PASSES and posterior.has_kl:
            warnings.warn(
                f"adapter {name!r} has been trained in {PASSES} forward passes without its KL, so its distribution is not "
                "that of the method: use BayesLoraTrainer or BayesLoraSFTTrainer, or the loss model.elbo(loss, examples=...)",
                stacklevel=2,
            )
