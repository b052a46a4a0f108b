"""How an optimiser treats the parameters of a distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class TrainingHints:
    """What training should know about the parameters of a distribution.

    Attributes:
        kinds: kinds of parameters by what their names begin with; all others are ``weights``. Kinds that begin with
            ``weights`` are point estimates, the only ones that weight decay is for.
        rate_multipliers: learning rates of kinds relative to the run's; 1 for those not named.
        split: kinds that plain SGD moves where training is split: along the KL, while AdamW follows the likelihood, or
            along ``both``, without AdamW.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    rate_multipliers: Mapping[str, float] = field(default_factory=dict)
    split: Mapping[str, Literal["kl", "both"]] = field(default_factory=dict)

    @property
    def all_kinds(self) -> frozenset[str]:
        """Every kind of parameter that there may be."""
        return frozenset({"weights", *self.kinds.values()})
