"""The methods by name. To add one, add a file and a line here."""

from __future__ import annotations

from importlib.metadata import version

from bayeslora.errors import InputError, did_you_mean
from bayeslora.methods import (
    adalora,
    bayesian_lora,
    bbb,
    blob,
    c_lora,
    checkpoint_ensemble,
    deep_ensemble,
    ivon,
    laplace,
    laplace_last_layer,
    lora,
    lora_plus,
    mc_dropout,
    monteclora,
    pvera,
    swag,
    temperature,
    tfb,
    zero_shot,
)
from bayeslora.methods.base import Method, Preset

ALL: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (
        lora,
        lora_plus,
        adalora,
        mc_dropout,
        checkpoint_ensemble,
        swag,
        deep_ensemble,
        temperature,
        bbb,
        blob,
        ivon,
        tfb,
        laplace,
        laplace_last_layer,
        c_lora,
        monteclora,
        pvera,
        bayesian_lora,
        zero_shot,
    )
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
        raise InputError(f"unknown method {name!r}{did_you_mean(name, METHODS)}; choose {', '.join(METHODS)}")
    return METHODS[name]


def find_preset(method: Method, name: str) -> Preset:
    """Look up one of the method's presets by name."""
    if name not in method.presets:
        hint = did_you_mean(name, method.presets)
        raise InputError(f"method {method.name!r} has no preset {name!r}{hint}; choose {', '.join(method.presets)}")
    return method.presets[name]
