"""TRL's ``SFTTrainer`` that maximises the ELBO."""

from __future__ import annotations

from copy import copy
from typing import Any

from bayeslora.errors import InputError
from bayeslora.train.trainer import BayesLoraTrainerMixin

try:
    from trl import SFTTrainer  # type: ignore[attr-defined]
    from trl.trainer.utils import create_model_from_path
except ImportError as error:
    raise InputError("BayesLoraSFTTrainer needs TRL, which is not installed; run: pip install trl") from error


class BayesLoraSFTTrainer(BayesLoraTrainerMixin, SFTTrainer):
    """TRL's ``SFTTrainer`` that maximises the ELBO; all arguments are those of TRL."""

    def __init__(self, model: Any, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        if isinstance(model, str):
            model, args = _load(model, args, kwargs.pop("quantization_config", None))
        super().__init__(model, args, *rest, **kwargs)


def _load(name: str, args: Any, quantization: Any) -> tuple[Any, Any]:
    """The model of this name, as TRL loads it, and the trainer's arguments without those that are used up."""
    given = dict(getattr(args, "model_init_kwargs", None) or {})
    if quantization is not None:
        given["quantization_config"] = quantization
    if args is not None:
        given.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
        if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            given["device_map"] = None  # every process has the whole model, or DeepSpeed spreads it
        args = copy(args)
        args.model_init_kwargs = None
    return create_model_from_path(name, **given), args
