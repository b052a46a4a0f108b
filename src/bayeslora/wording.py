"""Words for numbers."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things: ``1 question``, ``2 questions``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
