"""Which base model an adapter belongs to: recorded at creation, compared on loading."""

from __future__ import annotations

import warnings

from torch import nn

from bayeslora.adapter.base_fingerprint import differ
from bayeslora.adapter.config import BayesLoraConfig


class OtherBaseWarning(UserWarning):
    """An adapter was put on another base model than the one it was trained on."""


def note_base(config: BayesLoraConfig, fingerprint: str | None) -> None:
    """Record the fingerprint of the base model in a new adapter's settings; warn if a loaded adapter has another one.

    Adapters of older versions have none, and get none: their base model is not known.
    """
    if config.trained_on is not None:
        if fingerprint is not None and differ(config.trained_on, fingerprint):
            warnings.warn(
                f"the adapter was trained on another base model than this one, though of the same shape: its predictions will "
                f"not be those it was trained for; load {config.portable_base or 'the model it was trained on'} as it was then",
                OtherBaseWarning,
                stacklevel=2,
            )
    elif config.layer_names is None or config.base_fingerprint is not None:
        config.base_fingerprint = fingerprint


def name_base(config: BayesLoraConfig, model: nn.Module) -> None:
    """Save the settings with the public name of the base model, if that differs from its local path.

    In memory the name stays the local path, under which PEFT looks for the files of the base model.
    """
    place = model.__dict__.get("name_or_path")
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not place or not name or place == name:
        return
    config.base_names[place] = name
    if config.base_model_name_or_path == name:
        config.base_model_name_or_path = place
