"""What a method is: a posterior, and the settings with which it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON: Mapping[str, Any] = {
    "epochs": 4,
    "batch_size": 32,
    "weight_decay": 0.0,
    "optimiser": "adamw",
    "kl_rate": 0.01,
    "schedule": "linear",
    "warmup": 0.06,
    "milestones": (4, 6),
    "label_smoothing": 0.0,
    "kl_scaling": "elbo",
    "kl_beta": 1.0,
    "kl_warmup": 0.0,
    "draws": 1,
}
"""Training settings of every method, unless its preset says otherwise."""

PAPER: Mapping[str, Any] = {
    "epochs": 10,
    "batch_size": 8,
    "weight_decay": 0.1,
    "schedule": "multistep",
    "warmup": 0.0,
    "milestones": (4, 6),
    "label_smoothing": 0.1,
    "learning_rate": 5e-4,
}
"""Training settings that the Bayesian-LoRA paper gives for all methods (batch 16 for BoolQ and WinoGrande there)."""


@dataclass(frozen=True)
class Preset:
    """A named choice of settings.

    Attributes:
        settings: of the posterior.
        training: of the training, by the field's name in :class:`bayeslora.train.TrainingConfig`; what is missing is
            taken from :data:`COMMON`.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A way to be uncertain.

    Attributes:
        name: as given on the command line.
        description: in one line.
        posterior: name of its posterior.
        presets: ``default`` is what works, ``paper`` what was published.
    """

    name: str
    description: str
    posterior: str
    presets: Mapping[str, Preset]
