"""Serving: runs as ordinary LoRA adapters for vLLM and SGLang, and the client that averages over them.

Everything is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes

if TYPE_CHECKING:
    from bayeslora.serving.export import export_run
    from bayeslora.serving.manifest import Manifest, read_manifest
    from bayeslora.serving.remote import RemoteModel

__all__ = ["Manifest", "RemoteModel", "export_run", "read_manifest"]

_HOMES = {
    "Manifest": "bayeslora.serving.manifest",
    "RemoteModel": "bayeslora.serving.remote",
    "export_run": "bayeslora.serving.export",
    "read_manifest": "bayeslora.serving.manifest",
}


__getattr__ = lazy_attributes(__name__, _HOMES)
