"""Final answers of solutions: extraction and comparison."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Sequence

from bayeslora.errors import InputError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<brace>\{)?")

_SECONDS = 5
"""Time limit of math-verify in seconds; only the main thread can be interrupted."""


def boxed_answer(text: str) -> str | None:
    r"""The content of the last closed ``\boxed{...}`` (or ``\fbox``) of a solution, if any.

    Without braces it is the next word, as in ``$\boxed 2$``.

    Example:
        >>> boxed_answer(r"first $\boxed{1}$, then $\boxed{\frac{1}{2}}$, and $\boxed{never closed")
        '\\frac{1}{2}'
    """
    found = None
    for match in _BOX.finditer(text):
        content = _braced(text, match.end()) if match["brace"] else _word(text, match.end())
        found = content if content is not None else found
    return found


def same_answer(accepted: Sequence[str], given: str | None) -> bool:
    """Whether an answer equals an accepted one: as text, or mathematically (by math-verify)."""
    if given is None:
        return False
    if any(_squeezed(given) == _squeezed(answer) for answer in accepted):
        return True
    return any(equal_by_mathematics(answer, given) for answer in accepted)


def equal_by_mathematics(accepted: str, given: str) -> bool:
    """Whether math-verify considers two LaTeX answers equal; unparsable answers are not."""
    require_checker()
    from math_verify import parse, verify

    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    _hush()
    parsed = [parse(rf"\boxed{{{text}}}", parsing_timeout=seconds) for text in (accepted, given)]
    return bool(verify(*parsed, timeout_seconds=seconds))


def require_checker() -> None:
    """Raise if math-verify, which checks answers, is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("checking answers needs math-verify; run: pip install math-verify")


def _hush() -> None:
    """Silence math-verify: an unparsable answer is wrong, which needs no warning."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _braced(text: str, start: int) -> str | None:
    """Text up to the brace that closes the one before ``start``, or ``None``."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # skip an escaped brace
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


def _word(text: str, start: int) -> str | None:
    match = re.compile(r"\\[a-zA-Z]+(?:\s*\{[^{}]*\})*|[^\s$\\{}]+").match(text, start)
    return match.group() if match else None


def _squeezed(text: str) -> str:
    return "".join(text.split())
