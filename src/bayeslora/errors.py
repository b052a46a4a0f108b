"""Errors the user can fix, which the command line prints as one line with exit code 2, and helpers to classify other errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Invalid user input; the message says what is wrong, what is allowed and what to do."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Suffix for an error message that suggests the closest known name, or else one that begins with it; an empty
    string if there is none."""
    names, low = list(known), name.lower()
    close = difflib.get_close_matches(low, names, n=1, cutoff=cutoff)
    if not close and len(low) >= 3:
        close = [it for it in names if it.startswith(low)][:1]
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: BaseException) -> str:
    """An exception's message up to its first line break."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, raised by Python, by torch's allocators or by a library below them."""
    if isinstance(error, MemoryError):
        return True
    from torch import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or any(said in str(error) for said in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate",
    "DefaultCPUAllocator: not enough memory",
)
