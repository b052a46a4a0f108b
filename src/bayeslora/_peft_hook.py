"""Registers our method with PEFT as soon as both packages are imported, in either order.

PEFT imports transformers, which takes seconds. So importing ``bayeslora`` does not import PEFT; it registers when other code
imports PEFT.
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
    """Import hook that lets the other finders load PEFT and runs the registration after its module was executed."""

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
                del loader.exec_module  # restore the method of its class
                execute(module)
                importlib.import_module("bayeslora.adapter")

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def register_with_peft() -> None:
    """Register now if PEFT is already imported, otherwise when it is."""
    if "peft" in sys.modules:
        importlib.import_module("bayeslora.adapter")
    else:
        sys.meta_path.insert(0, _AfterPeft())
