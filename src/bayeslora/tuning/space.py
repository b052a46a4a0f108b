"""Search space: numeric settings of a run, each with two bounds, on a linear or a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from bayeslora.errors import InputError, did_you_mean
from bayeslora.runs.config import RunConfig, resolve

Values = Mapping[str, float]
"""Settings by name; integers where a setting is an integer."""

_MAPPINGS = {"settings": "adapter", "rate_multipliers": "training"}
"""Mappings whose entries are named ``settings.NAME`` here, and the part of a run they belong to."""


@dataclass(frozen=True)
class Axis:
    """A setting with its bounds."""

    name: str
    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """The value at a share of the way from ``low`` to ``high``; exact at the ends."""
        if share in (0.0, 1.0):
            return self.high if share else self.low
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)

    def share(self, value: float) -> float:
        """Position of a value between the bounds: 0 at ``low``, 1 at ``high``."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def parse_axis(text: str) -> Axis:
    """Parse ``NAME=LOW:HIGH`` or ``NAME=LOW:HIGH:log``."""
    name, _, bounds = text.partition("=")
    low, high, *scale = bounds.split(":") if bounds.count(":") in (1, 2) else ("", "")
    try:
        axis = Axis(name.replace("-", "_"), float(low), float(high), scale == ["log"])
    except ValueError:
        axis = None
    if axis is None or not name or scale not in ([], ["log"], ["linear"]):
        raise InputError(
            f"search has {text!r}; give NAME=LOW:HIGH or NAME=LOW:HIGH:log, such as learning_rate=1e-4:1e-2:log"
        )
    if not (math.isfinite(axis.low) and math.isfinite(axis.high) and axis.low < axis.high):
        raise InputError(f"search has {text!r}; give a lower bound that is below the upper one")
    if axis.log and axis.low <= 0:
        raise InputError(f"search has {text!r}; a logarithmic scale needs bounds above 0")
    return axis


class Space:
    """The searched settings, and a run with all other settings."""

    def __init__(self, axes: Sequence[Axis], run: RunConfig) -> None:
        self.axes, self.run = axes, run
        self._whole = {axis.name: _is_whole(axis.name, run) for axis in axes}
        for axis in axes:
            if self._whole[axis.name] and not (axis.low.is_integer() and axis.high.is_integer()):
                bounds = f"{axis.low:g}:{axis.high:g}"
                raise InputError(
                    f"search has bounds {bounds} for {axis.name}, which is a whole number; give whole bounds"
                )
        for end in (0.0, 1.0):
            self.config(self.values([end] * len(axes)))  # refuse invalid bounds early

    def values(self, point: Sequence[float]) -> dict[str, float]:
        """The settings at a point of the unit cube; integer settings are rounded."""
        found = {axis.name: axis.at(float(share)) for axis, share in zip(self.axes, point, strict=True)}
        return {name: round(value) if self._whole[name] else value for name, value in found.items()}

    def point(self, values: Values) -> list[float]:
        """Point of settings in the unit cube."""
        return [axis.share(values[axis.name]) for axis in self.axes]

    def config(self, values: Values) -> RunConfig:
        """The resolved run with these settings."""
        config = self.run
        for name, value in values.items():
            config = _with(config, name, value)
        return resolve(config)


def _with(config: RunConfig, name: str, value: float) -> RunConfig:
    """The run with one setting changed."""
    mapping, _, key = name.partition(".")
    part = _MAPPINGS[mapping] if key else _parts()[name]
    old = getattr(config, part)
    new = {**(getattr(old, mapping) or {}), key: value} if key else value
    return replace(config, **{part: replace(old, **{mapping: new})})


def _is_whole(name: str, run: RunConfig) -> bool:
    """Whether a setting is an integer; refused if it is not a number."""
    mapping, _, key = name.partition(".")
    if not key:
        if name not in _parts():
            known = [*_parts(), *(f"{it}.NAME" for it in _MAPPINGS)]
            raise InputError(f"search names {name!r}{did_you_mean(name, known)}; choose among {', '.join(known)}")
        return int in _kinds()[name]
    if mapping not in _MAPPINGS:
        raise InputError(f"search names {name!r}; before the point there may be {' or '.join(_MAPPINGS)}")
    if mapping == "rate_multipliers":
        return False
    from bayeslora.methods import find_method

    numbers = dict(_numbers_of(find_method(run.method).distribution(resolve(run).adapter.posterior).config_class))
    if key not in numbers:
        raise InputError(
            f"search names {name!r}{did_you_mean(key, numbers)}; numbers among the settings of method {run.method!r} are "
            f"{', '.join(numbers) or 'none'}"
        )
    return int in numbers[key]


def _parts() -> dict[str, str]:
    """The numeric settings of a run, and the part of it each belongs to."""
    return {name: part for part, name, _ in _numbers()}


def _kinds() -> dict[str, tuple[Any, ...]]:
    return {name: kinds for _, name, kinds in _numbers()}


def _numbers() -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Part, name and types of every field that is a number, or ``None`` until the preset sets it."""
    for part in fields(RunConfig):
        kind: Any = part.default_factory
        if is_dataclass(kind):
            yield from ((part.name, name, kinds) for name, kinds in _numbers_of(kind))


def _numbers_of(kind: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and types of every numeric field of a dataclass."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        if set(kinds) <= {int, float, type(None)}:
            yield field.name, kinds
