"""How deep something reaches: ``all`` layers, ``last:K`` of them, or a fraction of them such as ``0.5``."""

from __future__ import annotations

from bayeslora.errors import InputError


def upper_layers(text: str, layers: int, name: str = "layers") -> int:
    """How many of so many layers, counted from the top, a text means; at least 1."""
    kind, count = _parse(text, name)
    if kind == "all":
        return layers
    if kind == "fraction":
        return max(1, round(count * layers))
    if count > layers:
        raise InputError(f"{name} is {text!r}, but the model has {layers} layers; give at most last:{layers}")
    return int(count)


def check_depth(text: str, name: str) -> None:
    """Refuse what :func:`upper_layers` would, as far as that can be told without a model."""
    _parse(text, name)


def _parse(text: str, name: str) -> tuple[str, float]:
    if text == "all":
        return "all", 1.0
    word, _, count = str(text).partition(":")  # from a file it may be anything
    if word == "last" and count.isdecimal() and int(count) >= 1:
        return "last", float(count)
    try:
        fraction = float(text)
    except (TypeError, ValueError):
        fraction = 0.0
    if 0.0 < fraction <= 1.0:
        return "fraction", fraction
    raise InputError(f"{name} is {text!r}; give 'all', 'last:K' with K of at least 1, or a fraction such as 0.5")
