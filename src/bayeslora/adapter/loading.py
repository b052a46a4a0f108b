"""Adapters from directories that anybody may have written or damaged: loaded whole, or refused in one line."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn

from bayeslora.errors import InputError, first_line, out_of_memory


def load_adapter(base: nn.Module, place: Path) -> PeftModel:
    """The base model with the adapter that lies at ``place``, in evaluation mode.

    PEFT goes on where tensors are missing, with random numbers in their place, and looks for pickled ones where there is no
    file of safetensors. Here both are refused.
    """
    weights = place / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file():
        raise InputError(f"{place}: has no {weights.name}; restore it, or train again with --force")
    try:
        model = PeftModel.from_pretrained(base, str(place)).eval()
        with safe_open(weights, "pt") as file:
            found = set(file.keys())
        strangers = found ^ set(get_peft_model_state_dict(model))
    except (InputError, OSError):
        raise
    except Exception as error:  # whatever a broken file leads to
        if out_of_memory(error):
            raise
        raise InputError(
            f"{place}: holds no adapter that can be loaded ({first_line(error)}); restore it, or train again with --force"
        ) from error
    if strangers:
        name = min(strangers)
        what = "holds a tensor that is not the adapter's" if name in found else "lacks a tensor of the adapter"
        raise InputError(f"{weights}: {what}, {name!r}; restore it, or train again with --force")
    return model
