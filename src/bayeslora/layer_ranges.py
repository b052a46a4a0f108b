"""Parse a range of upper layers: ``all``, ``last:K``, or a fraction such as ``0.5``."""

from __future__ import annotations

from bayeslora.errors import InputError


def upper_layers(text: str, layers: int, name: str = "layers") -> int:
    """Number of layers, counted from the top, that ``text`` selects; at least 1."""
    kind, count = _parse(text, name)
    if kind == "all":
        return layers
    if kind == "fraction":
        return max(1, round(count * layers))
    if count > layers:
        raise InputError(f"{name} is {text!r}, but the model has {layers} layers; give at most last:{layers}")
    return int(count)


def check_depth(text: str, name: str) -> None:
    """Raise for a text that :func:`upper_layers` would refuse, as far as it can be checked without a model."""
    _parse(text, name)


def _parse(text: str, name: str) -> tuple[str, float]:
    if text == "all":
        return "all", 1.0
    word, _, count = str(text).partition(":")  # values from a file may have any type
    if word == "last" and count.isdecimal() and int(count) >= 1:
        return "last", float(count)
    try:
        fraction = float(text)
    except (TypeError, ValueError):
        fraction = 0.0
    if 0.0 < fraction <= 1.0:
        return "fraction", fraction
    raise InputError(f"{name} is {text!r}; give 'all', 'last:K' with K of at least 1, or a fraction such as 0.5")
