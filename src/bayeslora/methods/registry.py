"""The methods by name. To add one, add a file here and a line to ``bayeslora/method_names.py``."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from bayeslora.errors import InputError, did_you_mean
from bayeslora.method_names import METHOD_NAMES, unknown_method
from bayeslora.methods.base import Method, Preset

ALL: dict[str, Method] = {
    name: import_module(f"bayeslora.methods.{name.replace('-', '_')}").METHOD for name in METHOD_NAMES
}


def offered(peft: str) -> dict[str, Method]:
    """The methods available with a version of PEFT: all of ours, and those of PEFT's own that it has."""
    installed = _release(peft)
    return {name: method for name, method in ALL.items() if method.peft is None or method.peft <= installed}


def _release(peft: str) -> tuple[int, int]:
    major, minor = peft.split(".")[:2]
    return int(major), int(minor)


METHODS: dict[str, Method] = offered(version("peft"))


def find_method(name: str) -> Method:
    """Look up a method by name."""
    if name not in METHODS and name in ALL:
        since = ".".join(map(str, ALL[name].peft or ()))
        raise InputError(
            f"method {name!r} is an adapter of PEFT's own, from PEFT {since} on, and {version('peft')} is installed; update peft"
        )
    if name not in METHODS:
        raise unknown_method(name, METHODS)
    return METHODS[name]


def find_preset(method: Method, name: str) -> Preset:
    """Look up one of the method's presets by name."""
    if name not in method.presets:
        hint = did_you_mean(name, method.presets)
        raise InputError(f"method {method.name!r} has no preset {name!r}{hint}; choose {', '.join(method.presets)}")
    return method.presets[name]
