"""Training: runs from settings to result, and a mixin that makes transformers' ``Trainer`` (or TRL's) maximise the ELBO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes
from bayeslora.runs.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    PredictionConfig,
    RunConfig,
    TrainingConfig,
    resolve,
)

if TYPE_CHECKING:
    from bayeslora.runs.result import RunResult
    from bayeslora.train.calibration_callback import CalibrationCallback
    from bayeslora.train.run import RunContext, train
    from bayeslora.train.sft import BayesLoraSFTTrainer
    from bayeslora.train.trainer import BayesLoraTrainer, BayesLoraTrainerMixin

__all__ = [
    "AdapterConfig",
    "BayesLoraSFTTrainer",
    "BayesLoraTrainer",
    "BayesLoraTrainerMixin",
    "CalibrationCallback",
    "DataConfig",
    "ModelConfig",
    "PredictionConfig",
    "RunConfig",
    "RunContext",
    "RunResult",
    "TrainingConfig",
    "resolve",
    "train",
]

_HOMES = {
    "BayesLoraSFTTrainer": "bayeslora.train.sft",
    "BayesLoraTrainer": "bayeslora.train.trainer",
    "BayesLoraTrainerMixin": "bayeslora.train.trainer",
    "CalibrationCallback": "bayeslora.train.calibration_callback",
    "RunContext": "bayeslora.train.run",
    "RunResult": "bayeslora.runs.result",
    "train": "bayeslora.train.run",
}


__getattr__ = lazy_attributes(__name__, _HOMES)
