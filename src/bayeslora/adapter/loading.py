"""Loads adapters from untrusted or damaged directories: completely, or refused with a one-line error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn

from bayeslora.adapter.base import ATTRIBUTE
from bayeslora.adapter.expected import expecting
from bayeslora.adapter.model import remove_holder
from bayeslora.adapter.sound import require_finite, require_floats
from bayeslora.errors import InputError, first_line, out_of_memory


def load_adapter(base: nn.Module, place: Path) -> PeftModel:
    """The base model with the adapter at ``place``, in evaluation mode.

    PEFT replaces missing tensors by random numbers, and loads pickled ones where there is no safetensors file. Here both are
    refused, and so are non-finite numbers, and settings that do not fit the tensors.
    """
    weights = place / SAFETENSORS_WEIGHTS_NAME
    if not weights.is_file():
        raise InputError(f"{place}: has no {weights.name}; restore it, or train again with --force")
    with _one_line(place):
        tensors = load_file(weights)
    require_finite(tensors, weights)
    with _one_line(place), expecting({name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        model = PeftModel.from_pretrained(base, str(place)).eval()
        own = get_peft_model_state_dict(model)
        require_floats(tensors, own)
    if strangers := set(tensors) ^ set(own):
        name = min(strangers)
        what = "holds a tensor that is not the adapter's" if name in tensors else "lacks a tensor of the adapter"
        raise InputError(f"{weights}: {what}, {name!r}; restore it, or train again with --force")
    return model


@contextmanager
def restored_on_failure(base: nn.Module) -> Iterator[None]:
    """Take every adapter off a base model again if the block fails, which may be before there is a ``PeftModel`` to unload."""
    adapted = hasattr(base, "peft_config")
    try:
        yield
    except BaseException:
        if not adapted and hasattr(base, "peft_config"):
            del base.peft_config
        if hasattr(base, ATTRIBUTE):
            remove_holder(base)
        for path, layer in list(base.named_modules()):
            if isinstance(layer, BaseTunerLayer):
                parent, _, name = path.rpartition(".")
                setattr(base.get_submodule(parent), name, layer.get_base_layer())
        raise


@contextmanager
def _one_line(place: Path) -> Iterator[None]:
    """Turn any error from a broken directory into one line that names it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from error
    except OSError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise InputError(
            f"{place}: holds no adapter that can be loaded ({first_line(error)}); restore it, or train again with --force"
        ) from error
