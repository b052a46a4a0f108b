"""Kinds of values against annotations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from bayeslora.errors import InputError
from bayeslora.type_checks import check_kinds, fits


@dataclass
class Settings:
    count: int = 1
    rate: float | None = None
    names: tuple[str, ...] = ()
    how: Literal["a", "b"] = "a"
    pairs: Annotated[Mapping[str, float], "noted"] | None = None
    on: bool = False
    anything: Any = None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": 3, "rate": 1, "names": ["x"], "how": "b", "pairs": {"x": 1}, "on": True, "anything": [object()]},
        {"rate": 0.5, "names": ("x", "y"), "pairs": None},
        {"rate": float("nan")},  # a number to Python; bounds are checked elsewhere
    ],
)
def test_what_is_allowed(values):
    check_kinds(Settings, values)


@pytest.mark.parametrize(
    "values, advice",
    [
        ({"count": 1.5}, "count is 1.5; give a whole number"),
        ({"count": True}, "count is True; give a whole number"),
        ({"count": None}, "count is None; give a whole number"),
        ({"rate": "1"}, "rate is '1'; give a number or null"),
        ({"names": "x"}, "names is 'x'; give a list, each a text"),
        ({"names": [1]}, r"names is \[1\]; give a list, each a text"),
        ({"how": ["a"]}, "give one of a, b"),
        ({"pairs": {"x": "1"}}, "give an object of names and values or null"),
        ({"pairs": [1]}, "give an object"),
        ({"on": 1}, "on is 1; give true or false"),
    ],
)
def test_what_is_not(values, advice):
    with pytest.raises(InputError, match=advice):
        check_kinds(Settings, values)


def test_what_python_cannot_check_is_left_alone():
    assert fits(3, "not a type")
