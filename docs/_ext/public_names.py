"""Lets autodoc see the names that packages import on first use: it asks ``dir``, which does not know them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

PACKAGES = ("bayeslora", "bayeslora.train", "bayeslora.export", "bayeslora.remote", "bayeslora.lm_eval")


def setup(app: Any) -> dict[str, bool]:
    """Import all of them once."""
    for package in map(import_module, PACKAGES):
        for name in package.__all__:
            setattr(package, name, getattr(package, name))
    return {"parallel_read_safe": True}
