"""Checks of numbers from users and files, in one wording: what was given, and what is allowed."""

from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import Any

from bayeslora.errors import InputError


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse what is not a finite number within the given bounds; ``above`` and ``below`` exclude the bound itself."""
    within = is_number(value) and (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if not within:
        bounds = [("of at least", least), ("above", above), ("of at most", most), ("below", below)]
        said = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        raise InputError(f"{name} is {value!r}; give a finite number {said}".rstrip())


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} is {value!r}; give a whole number of at least {least}")


def check_seed(value: Any) -> None:
    """Refuse what no generator takes as its seed."""
    check_count("seed", value, least=0)
    if value >= 2**64:
        raise InputError(f"seed is {value}; give a number below 2^64")


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number and not a boolean."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return real and bool(-sys.float_info.max <= value <= sys.float_info.max)
