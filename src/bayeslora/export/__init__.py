"""Export runs as ordinary LoRA adapters, one per draw, for vLLM, SGLang and other engines that serve LoRA.

Everything is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bayeslora._lazy import lazy_attributes

if TYPE_CHECKING:
    from bayeslora.export.adapters import export_run
    from bayeslora.export.manifest import Manifest, read_manifest

__all__ = ["Manifest", "export_run", "read_manifest"]

_HOMES = {
    "Manifest": "bayeslora.export.manifest",
    "export_run": "bayeslora.export.adapters",
    "read_manifest": "bayeslora.export.manifest",
}


__getattr__ = lazy_attributes(__name__, _HOMES)
