"""Checks regular expressions from untrusted configurations before they are used.

Some expressions take longer than the universe is old for a name of forty letters, and Python's matcher cannot be interrupted. So
they are tried on all names in a separate process, which can be killed. Plain names need no trial.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from bayeslora.errors import InputError

SECONDS = 10.0
"""Time limit for all names together; a sensible expression takes a thousandth of it."""

LONGEST = 10_000
"""Maximum length of an expression."""

PLAIN = re.compile(r"[\w.-]+")

_TRIAL = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for number, expression in enumerate(expressions):
    print(number, flush=True)
    for name in names:
        re.fullmatch(expression, name)
        re.match(rf"(.*\\.)?({expression})$", name)
"""


def require_plain_name(setting: str, name: object) -> None:
    """Refuse anything but a module name, or the end of one."""
    if not (isinstance(name, str) and PLAIN.fullmatch(name)):
        raise ValueError(f"{setting} has {name!r}, which is no name of a module; give names such as 'lm_head'")


def require_quick(expressions: Iterable[str], names: Sequence[str]) -> None:
    """Refuse an expression that is invalid, or too slow on these names."""
    tried = [expression for expression in expressions if not PLAIN.fullmatch(expression)]
    for expression in tried:
        if len(expression) > LONGEST:
            raise InputError(
                f"an expression for names of modules has {len(expression)} letters; give at most {LONGEST}"
            )
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"{_shown(expression)} is no regular expression for names of modules: {error}") from error
    if tried:
        _try(tried, names)


def _try(expressions: Sequence[str], names: Sequence[str]) -> None:
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    try:
        given = json.dumps([expressions, names])
        subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        reached = (error.stdout or b"0").split()
        expression = expressions[int(reached[-1]) if reached else 0]
        raise InputError(
            f"{_shown(expression)} takes too long to match with names of modules; list the names, or write it without "
            "repeats inside of repeats"
        ) from None
    except OSError:  # no process can be started here: skip the trial
        return


def _shown(expression: str) -> str:
    """An expression, truncated if it is long."""
    return repr(expression if len(expression) <= 60 else f"{expression[:60]}...")
