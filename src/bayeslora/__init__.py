"""Fine-tuned language models that know what they do not know: distributions over LoRA factors.

Importing this package makes PEFT know the method ``bayeslora``. What needs PEFT or transformers is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bayeslora._peft_hook import register_with_peft

if TYPE_CHECKING:
    from bayeslora.adapter import BayesLoraConfig, BayesLoraModel, find_holder
    from bayeslora.models import load_model
    from bayeslora.train.trained import load_run

__version__ = "0.1.0.dev0"

__all__ = ["BayesLoraConfig", "BayesLoraModel", "find_holder", "load_model", "load_run"]

_HOMES = {
    "BayesLoraConfig": "bayeslora.adapter",
    "BayesLoraModel": "bayeslora.adapter",
    "find_holder": "bayeslora.adapter",
    "load_model": "bayeslora.models",
    "load_run": "bayeslora.train.trained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bayeslora' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


register_with_peft()
