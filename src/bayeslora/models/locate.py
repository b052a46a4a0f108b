"""Resolve the name of a model: a built-in one, a directory, or the hub."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.models import smollm2


@dataclass(frozen=True)
class Builtin:
    """A model that comes with a Python package instead of the hub.

    ``find`` returns its file if the package is installed, ``directory`` the model in Hugging Face format. ``hub_id`` is the
    original model on the hub.
    """

    description: str
    install: str
    find: Callable[[], Path | None]
    directory: Callable[[], Path]
    hub_id: str | None = None


BUILTINS = {
    "smollm2": Builtin(
        smollm2.DESCRIPTION, smollm2.INSTALL, smollm2.find_smollm2, smollm2.smollm2_directory, smollm2.HUB_ID
    ),
}
"""Built-in models by name."""


def locate(name: str, revision: str | None) -> Path | None:
    """The directory of a model, or ``None`` if the name must be a hub id."""
    path = Path(os.path.expanduser(name))
    local = name in BUILTINS or (bool(name) and os.path.exists(path))
    if local and revision is not None:
        raise InputError(f"revision {revision!r} was given, but {name!r} is not a hub model; leave the revision out")
    if name in BUILTINS:
        return BUILTINS[name].directory()
    if local:
        return _check_directory(path)
    if not name or name[0] in "./~" or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise InputError(f"{name!r}: no such directory; pass a directory, a hub id, or one of: {', '.join(BUILTINS)}")
    close = difflib.get_close_matches(name.lower(), BUILTINS, n=1, cutoff=0.75)
    if close:
        raise InputError(f"unknown model {name!r}; did you mean {close[0]!r}?")
    return None


def portable_name(name: str) -> str | None:
    """The hub id of a built-in model, which other tools and machines know; ``None`` for other models."""
    return BUILTINS[name].hub_id if name in BUILTINS else None


def _check_directory(path: Path) -> Path:
    if path.suffix == ".gguf":
        raise InputError(f"{path}: is a GGUF file; convert it first: bayeslora convert {path} DIRECTORY")
    if not path.is_dir():
        raise InputError(f"{path}: is not a directory; pass the directory of a model in Hugging Face format")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise InputError(f"{path}: holds an adapter, not a model; pass the model it was trained on")
        raise InputError(f"{path}: has no config.json; pass the directory of a model in Hugging Face format")
    if not any(path.glob("*.safetensors")):
        raise InputError(
            f"{path}: has no safetensors weights; other formats can run code when loaded and are not read, "
            "so save the model again with save_pretrained"
        )
    return path
