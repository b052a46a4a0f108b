"""Errors that are the user's to mend, which the command line prints as one line, exiting with 2; and what tells others apart."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something given by the user cannot be used; the message says what, what is allowed and what to do."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The tail of an error line that names the closest known name, if one is as close as the cutoff asks for."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: BaseException) -> str:
    """An exception's message up to its first line break."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether there is no memory left, whoever asked for it: Python, torch's own allocators, or a library below them."""
    if isinstance(error, MemoryError):
        return True
    from torch import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory",
)
