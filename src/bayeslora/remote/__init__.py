"""Client for a served run: queries a server for every exported draw, and averages the results.

It is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes

if TYPE_CHECKING:
    from bayeslora.remote.model import RemoteModel

__all__ = ["RemoteModel"]

_HOMES = {"RemoteModel": "bayeslora.remote.model"}


__getattr__ = lazy_attributes(__name__, _HOMES)
