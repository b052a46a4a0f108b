"""Columns that may be a field of ours under another name."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from bayeslora.errors import did_you_mean

SYNONYMS = {
    "label": ("category", "class", "target", "sentiment", "intent"),
    "choices": ("options", "alternatives", "candidates"),
}
"""What others call our fields."""


def looks_like(field: str, columns: Iterable[str]) -> str | None:
    """The first column that is called like a field: by a common other name, or misspelt."""
    return next(
        (
            name
            for name in columns
            if name.strip().lower() in SYNONYMS.get(field, ()) or did_you_mean(name, [field], cutoff=0.8)
        ),
        None,
    )


def columns_option(columns: Mapping[str, str]) -> str:
    """The option that says what our fields are called in the data, as a shell takes it."""
    return shlex.join(["--columns", *(f"{ours}={theirs}" for ours, theirs in columns.items())])
