"""How an optimiser treats the parameters of a distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TrainingHints:
    """Hints for training the parameters of a distribution.

    Attributes:
        kinds: parameter kinds by name prefix; all others are ``weights``. Kinds that begin with ``weights`` are point
            estimates, the only ones with weight decay.
        rate_multipliers: learning rates of kinds relative to the run's; 1 if not given.
        split: kinds that plain SGD updates where training is split: along the KL, while AdamW follows the likelihood, or
            along ``both``, without AdamW.
        draws: weight draws per batch, among which its rows are divided: several cost no more than one.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    rate_multipliers: Mapping[str, float] = field(default_factory=dict)
    split: Mapping[str, Literal["kl", "both"]] = field(default_factory=dict)
    draws: int = 1

    @property
    def all_kinds(self) -> frozenset[str]:
        """All kinds of parameters that may occur."""
        return frozenset({"weights", *self.kinds.values()})
