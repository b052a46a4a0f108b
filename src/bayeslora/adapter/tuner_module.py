"""The common base of our tuner layers: a torch module that PEFT recognises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


class TunerModule(nn.Module, BaseTunerLayer):
    """A module and PEFT's mixin in one."""

    merged_adapters: list[str]

    if TYPE_CHECKING:  # what the mixin brings has no types

        def __getattr__(self, name: str) -> Any: ...
