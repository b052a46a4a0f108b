"""Names of the methods. Nothing heavy is imported for them, so that a misspelt one is told at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from bayeslora.errors import InputError, did_you_mean

METHOD_NAMES = (
    "lora",
    "lora-plus",
    "adalora",
    "mc-dropout",
    "checkpoint-ensemble",
    "swag",
    "deep-ensemble",
    "temperature",
    "bbb",
    "blob",
    "ivon",
    "tfb",
    "laplace",
    "laplace-last-layer",
    "c-lora",
    "monteclora",
    "pvera",
    "bayesian-lora",
    "zero-shot",
)
"""All methods; each is a file in ``bayeslora/methods``, with underscores in its name."""


def check_method_names(names: Iterable[str]) -> None:
    """Refuse names that no method has. Nothing is done where the methods are imported: there may be more of them."""
    if "bayeslora.methods" in sys.modules:
        return
    for name in names:
        if name not in METHOD_NAMES:
            raise unknown_method(name, METHOD_NAMES)


def unknown_method(name: str, known: Iterable[str]) -> InputError:
    """The error of a name that no method has."""
    return InputError(f"unknown method {name!r}{did_you_mean(name, known)}; choose {', '.join(known)}")
