"""Run-time checks of values against the annotations of a dataclass, since values from a file may have any type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bayeslora.errors import InputError

WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
    Path: "a path",
}


def check_kinds(kind: type, values: Mapping[str, Any]) -> None:
    """Raise if a value, by field name of the dataclass ``kind``, does not match the field's annotation."""
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        if not fits(value, hints[name]):
            raise InputError(f"{name} is {value!r}; give {describe(hints[name])}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value matches an annotation. The values of a ``Literal`` are not checked here.

    An ``int`` passes for a ``float``, and a list for a tuple.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return fits(value, parts[0])
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) for part in parts)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(fits(entry, parts[0]) for entry in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, parts[0]) and fits(v, parts[1]) for k, v in value.items())
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def describe(hint: Any) -> str:
    """Describe the allowed values in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(parts[0])
    if origin in (Union, UnionType):
        return " or ".join(map(describe, parts))
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple:
        return f"a list, each {describe(parts[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object of names and values"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))
