"""Registers our method with PEFT as soon as both packages are imported, in either order.

PEFT brings transformers along, which takes seconds to import. So importing ``bayeslora`` does not import PEFT; it waits
for somebody else to do so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterPeft(MetaPathFinder):
    """Lets the other finders find PEFT, and runs the registration once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "peft":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                del loader.exec_module  # back to the one of its class
                execute(module)
                importlib.import_module("bayeslora.adapter")

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_peft() -> None:
    """Register now if PEFT is there already, else when it is imported."""
    if "peft" in sys.modules:
        importlib.import_module("bayeslora.adapter")
    else:
        sys.meta_path.insert(0, _AfterPeft())
