"""PEFT's own stochastic adapters, by name: PEFT creates, computes and saves them; we only control when they sample."""

from bayeslora.adapter.foreign.holder import ForeignHolder
from bayeslora.adapter.foreign.monteclora import MontecloraHolder, MontecloraSettings
from bayeslora.adapter.foreign.pvera import PveraHolder, PveraSettings

FOREIGN: dict[str, type[ForeignHolder]] = {"monteclora": MontecloraHolder, "pvera": PveraHolder}

__all__ = ["FOREIGN", "ForeignHolder", "MontecloraHolder", "MontecloraSettings", "PveraHolder", "PveraSettings"]
