"""Fine-tuned language models that know what they do not know: distributions over LoRA factors.

Importing this package registers the method ``bayeslora`` with PEFT. Names that need PEFT or transformers are imported lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes
from bayeslora._peft_hook import register_with_peft

if TYPE_CHECKING:
    from bayeslora.adapter import BayesLoraConfig, BayesLoraModel, find_holder
    from bayeslora.models import load_model
    from bayeslora.runs.config import RunConfig
    from bayeslora.runs.load import load_run
    from bayeslora.runs.trained import TrainedModel
    from bayeslora.train.trainer import BayesLoraTrainer, BayesLoraTrainerMixin

__version__ = "0.1.0.dev0"

__all__ = [
    "BayesLoraConfig",
    "BayesLoraModel",
    "BayesLoraTrainer",
    "BayesLoraTrainerMixin",
    "RunConfig",
    "TrainedModel",
    "find_holder",
    "load_model",
    "load_run",
]

_HOMES = {
    "BayesLoraConfig": "bayeslora.adapter",
    "BayesLoraModel": "bayeslora.adapter",
    "BayesLoraTrainer": "bayeslora.train.trainer",
    "BayesLoraTrainerMixin": "bayeslora.train.trainer",
    "RunConfig": "bayeslora.runs.config",
    "TrainedModel": "bayeslora.runs.trained",
    "find_holder": "bayeslora.adapter",
    "load_model": "bayeslora.models",
    "load_run": "bayeslora.runs.load",
}


__getattr__ = lazy_attributes(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


register_with_peft()
