"""Checks of numbers, and their wording."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.number_checks import check_count, check_number, is_number


@pytest.mark.parametrize(
    "value, bounds",
    [
        (0, {"least": 0}),
        (1e-300, {"above": 0}),
        (1, {"above": 0, "most": 1}),
        (-5.5, {}),
        (np.float32(0.5), {"least": 0, "below": 1}),
        (Fraction(1, 3), {"above": 0}),
        (10**300, {"above": 0}),
    ],
)
def test_what_is_within_passes(value: Any, bounds: dict[str, float]) -> None:
    check_number("x", value, **bounds)


@pytest.mark.parametrize(
    "value, bounds, words",
    [
        (-1, {"least": 0}, "x is -1; give a finite number of at least 0"),
        (0, {"above": 0}, "x is 0; give a finite number above 0"),
        (1.5, {"above": 0, "most": 1}, "x is 1.5; give a finite number above 0 and of at most 1"),
        (1, {"least": 0, "below": 1}, "x is 1; give a finite number of at least 0 and below 1"),
        (float("nan"), {}, "x is nan; give a finite number"),
        (float("inf"), {"above": 0}, "x is inf; give a finite number above 0"),
        (10**400, {}, f"x is {10**400}; give a finite number"),
        ("3", {"least": 0}, "x is '3'; give a finite number of at least 0"),
        (True, {"least": 0}, "x is True; give a finite number of at least 0"),
        (None, {}, "x is None; give a finite number"),
    ],
)
def test_what_is_not_is_refused_with_its_bounds(value: Any, bounds: dict[str, float], words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_number("x", value, **bounds)
    assert str(caught.value) == words


@pytest.mark.parametrize("value, least", [(1, 1), (0, 0), (np.int64(7), 2)])
def test_counts(value: Any, least: int) -> None:
    check_count("n", value, least)


@pytest.mark.parametrize("value, least", [(0, 1), (-1, 0), (1.0, 1), ("2", 1), (True, 1), (None, 1)])
def test_what_is_no_count(value: Any, least: int) -> None:
    with pytest.raises(InputError) as caught:
        check_count("n", value, least)
    assert str(caught.value) == f"n is {value!r}; give a whole number of at least {least}"


@pytest.mark.parametrize("value, is_one", [(1, True), (np.float64(2), True), (False, False), (1j, False), ("1", False)])
def test_numbers(value: Any, is_one: bool) -> None:
    assert is_number(value) is is_one
