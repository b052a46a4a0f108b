"""Stochastic adapters of PEFT's own, by name: PEFT makes, computes and saves them; we only say when they sample."""

from bayeslora.adapter.foreign.holder import ForeignHolder
from bayeslora.adapter.foreign.monteclora import MontecloraHolder, MontecloraSettings
from bayeslora.adapter.foreign.pvera import PveraHolder, PveraSettings

FOREIGN: dict[str, type[ForeignHolder]] = {"monteclora": MontecloraHolder, "pvera": PveraHolder}

__all__ = ["FOREIGN", "ForeignHolder", "MontecloraHolder", "MontecloraSettings", "PveraHolder", "PveraSettings"]
