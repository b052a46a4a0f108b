"""Checks of numbers from users and files."""

from __future__ import annotations

import sys
from numbers import Real

from bayeslora.errors import InputError


def check_positive(value: float, name: str, most: float = sys.float_info.max) -> None:
    """Refuse a value that is not a finite number above 0."""
    if not is_number(value) or not 0 < value <= most:
        limit = "" if most == sys.float_info.max else " and at most 1"
        raise InputError(f"{name} is {value!r}; give a finite number above 0{limit}")


def check_share(value: float, name: str, above: bool = False) -> float:
    """Return the number if it is from 0 to 1; ``above`` excludes 0."""
    if not is_number(value) or not 0 <= value <= 1 or (above and value == 0):
        raise InputError(f"{name} is {value!r}; give a number {'above 0 and at most' if above else 'from 0 to'} 1")
    return value


def is_number(value: object) -> bool:
    """Whether a value is a real number and not a boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)
