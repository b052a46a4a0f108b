"""TRL's ``SFTTrainer`` that maximises the ELBO."""

from __future__ import annotations

from bayeslora.errors import InputError
from bayeslora.train.trainer import BayesLoraTrainerMixin

try:
    from trl import SFTTrainer  # type: ignore[attr-defined]
except ImportError as error:
    raise InputError("BayesLoraSFTTrainer needs TRL, which is not installed; run: pip install trl") from error


class BayesLoraSFTTrainer(BayesLoraTrainerMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` that maximises the ELBO; all arguments are those of TRL."""
