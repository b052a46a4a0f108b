"""A library that others import at their start, loaded only if something of it is used.

``importlib.util.LazyLoader`` does not serve here: torch, while it is being imported, looks for the file names of all modules,
which would load the library half-way, before it can work.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


def import_lazily(name: str) -> None:
    """Make ``import name`` cheap in this process: the library is loaded when one of its attributes is first used.

    No effect if it is imported already, or not installed. For processes in which one thread uses the library at first.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _NotLoaded
    module.__dict__.pop("__path__", None)
    sys.modules[name] = module


class _NotLoaded(ModuleType):
    """A module whose code has not run. It knows its name and its file; any other attribute runs the code.

    ``__path__`` is one of those, so that none of its own modules is imported before it.
    """

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:  # as for a failed import, the next use tries again
            self.__dict__.pop("__path__", None)
            self.__class__ = _NotLoaded
            raise
        return getattr(self, name)
