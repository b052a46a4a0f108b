"""The common base of our tuner layers: a torch module that PEFT recognises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


class TunerModule(nn.Module, BaseTunerLayer):
    """A torch module combined with PEFT's mixin."""

    merged_adapters: list[str]

    if TYPE_CHECKING:  # the mixin's attributes have no types

        def __getattr__(self, name: str) -> Any: ...
