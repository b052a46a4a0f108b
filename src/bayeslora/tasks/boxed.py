"""Final answers of solutions: where they stand, and whether two of them are the same."""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Sequence

from bayeslora.errors import InputError

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?P<brace>\{)?")

_SECONDS = 5
"""After which math-verify gives up comparing; only the main thread can be interrupted."""


def boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox``) of a solution, if it has one that is closed.

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
    """Whether an answer equals one of those accepted: as it is written, or else as mathematics (by math-verify)."""
    if given is None:
        return False
    if any(_squeezed(given) == _squeezed(answer) for answer in accepted):
        return True
    return any(equal_by_mathematics(answer, given) for answer in accepted)


def equal_by_mathematics(accepted: str, given: str) -> bool:
    """Whether math-verify takes two answers in LaTeX to be the same; what it cannot read is not."""
    require_checker()
    from math_verify import parse, verify

    seconds = _SECONDS if threading.current_thread() is threading.main_thread() else None
    _hush()
    parsed = [parse(rf"\boxed{{{text}}}", parsing_timeout=seconds) for text in (accepted, given)]
    return bool(verify(*parsed, timeout_seconds=seconds))


def require_checker() -> None:
    """Refuse to go on where answers could not be checked."""
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("checking answers needs math-verify; run: pip install math-verify")


def _hush() -> None:
    """What math-verify cannot read is a wrong answer and nothing to warn of."""
    for name in ("math_verify.parser", "math_verify.grader", "math_verify.utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _braced(text: str, start: int) -> str | None:
    """Up to the brace that closes the one before ``start``; nothing if none does."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is none
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
