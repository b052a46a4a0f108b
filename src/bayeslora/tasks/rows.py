"""Convert rows to items, by the same rules for every task.

Text is normalised field by field, so that prompts differ in words and not in typography. Malformed or repeated rows are
left out of training data, counted and logged; evaluation data keep every row that can be represented, since dropping rows
would change the meaning of a score.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

from bayeslora.errors import InputError
from bayeslora.tasks.base import FromRow, Item, Split

SPLIT_SEED = 2024
"""Seed of every division into splits. It is fixed, since another seed would define another benchmark."""

DUPLICATE = "duplicate"

T = TypeVar("T")
Read = TypeVar("Read", bound=FromRow)

_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛", "'"),
        **dict.fromkeys("“”„‟", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        "…": "...",
        **dict.fromkeys("\u200b\u2060\ufeff\u00ad", None),  # zero width: zero-width space, joiner, BOM, soft hyphen
    }
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one row, and its origin for error messages."""

    values: Mapping[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """An item read from a row, with the flaw that excludes it from training data, if any."""

    item: T
    flaw: str | None = None


class Malformed(Exception):
    """A row cannot be converted to an item.

    Args:
        reason: common to all such rows.
        detail: about this one.
        here: the reason as it is told of this row alone, if it names a place in it.
    """

    def __init__(self, reason: str, detail: str = "", here: str = "") -> None:
        super().__init__(f"{here or reason}{': ' if detail else ''}{detail}")
        self.reason = reason


Reader = Callable[[Mapping[str, Any]], Candidate[T]]
"""Converts a row to an item, or raises :class:`Malformed`."""


def normalise(text: str) -> str:
    """Straight quotes, ``-`` for every dash and minus, ``...`` for the ellipsis, single spaces, trimmed.

    Line breaks and every Unicode space (the non-breaking one too) are white space; zero-width characters are removed.
    Everything else is unchanged, including text that a data set has decoded wrongly.

    Example:
        >>> normalise(" “It’s  5–6\u00a0°C…” ")
        '"It\\'s 5-6 °C..."'
    """
    return " ".join(text.translate(_TYPOGRAPHY).split())


def is_missing(value: Any) -> bool:
    """Whether a field says nothing: ``null``, an empty text, or NaN, which tables have for missing numbers."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def text_field(values: Mapping[str, Any], name: str) -> str:
    """A field's normalised text, which may be empty."""
    if values.get(name) is None:
        raise Malformed(f"no {name}")
    return checked_text(values[name], name)


def checked_text(value: Any, name: str) -> str:
    """The normalised text of a value that must be a string of whole characters."""
    if not isinstance(value, str):
        raise Malformed(f"{name} is no text", repr(value)[:60])
    return normalise(whole_characters(value, name))


def whole_characters(text: str, name: str) -> str:
    """A text, refused if it holds half a character."""
    if has_half_character(text):
        raise Malformed(f"{name} is no valid Unicode", ascii(text)[:60])
    return text


def has_half_character(text: str) -> bool:
    """Whether a text holds half a character (a lone surrogate), which tokenizers and files do not take."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def row_id(values: Mapping[str, Any]) -> str:
    """The row's id, or a digest of its fields, which does not depend on the row's position."""
    given = values.get("id")
    return whole_characters(str(given), "id") if given not in (None, "") else digest(repr(sorted(values.items())))[:12]


def clean(rows: Iterable[Row], read: Reader[Item], where: str, *, drop: bool) -> Split:
    """The questions of all rows; see :func:`clean_rows`."""
    return Split(*clean_rows(rows, read, content_key, where, drop=drop))


def clean_rows(
    rows: Iterable[Row], read: Reader[Read], key: Callable[[Read], str], where: str, *, drop: bool
) -> tuple[tuple[Read, ...], dict[str, int]]:
    """Items of all rows, and how many rows were left out by reason.

    With ``drop`` (training data) malformed, flawed and repeated rows are left out; without it a row that cannot be
    represented is an error. Rows of equal keys repeat each other. ``where`` names the data in the log.
    """
    counts: Counter[str] = Counter()
    items = tuple(usable(rows, read, key, counts, drop=drop))
    warn_of_left_out(where, counts)
    return items, dict(counts)


def warn_of_left_out(where: str, counts: Mapping[str, int]) -> None:
    """Log how many rows were left out, by reason."""
    for reason, count in counts.items():
        logger.warning("%s: left out %d of its rows (%s)", where, count, reason)


def usable(
    rows: Iterable[Row], read: Reader[Read], key: Callable[[Read], str], counts: Counter[str], *, drop: bool
) -> Iterator[Read]:
    """The items of :func:`clean_rows` one by one; ``counts`` counts what is left out. Of each item only a hash is remembered."""
    seen: set[bytes] = set()
    for row in rows:
        try:
            candidate = read(row.values)
        except Malformed as problem:
            if not drop:
                raise InputError(f"{row.origin}: {problem}; correct or remove it") from problem
            counts[problem.reason] += 1
            continue
        content = hashlib.sha256(key(candidate.item).encode()).digest()
        flaw = candidate.flaw or (DUPLICATE if content in seen else None)
        if drop and flaw:
            counts[flaw] += 1
            continue
        seen.add(content)
        yield replace(candidate.item, origin=row.origin)


class Items(Collection[T]):
    """Items that are read anew in every pass, so that they need not fit into memory.

    Args:
        passes: starts a pass, which adds what it leaves out to the counter.
    """

    def __init__(self, passes: Callable[[Counter[str]], Iterator[T]]) -> None:
        self._passes = passes
        self.left_out: Counter[str] = Counter()
        self._count = sum(1 for _ in passes(self.left_out))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return self._passes(Counter())

    def __contains__(self, item: object) -> bool:
        return any(it == item for it in self)


def divide(items: Sequence[T], shares: Sequence[float], key: Callable[[T], str]) -> list[tuple[T, ...]]:
    """Divide items into parts of about these shares by a seeded hash of each item's key, independent of their order.

    Items of equal keys stay together: they rank as one block, which belongs to the part that contains its middle.
    """
    ranks = [rank(key(item)) for item in items]
    part = parts_by_rank(Counter(ranks), shares)
    return [tuple(item for item, own in zip(items, ranks, strict=True) if part[own] == k) for k in range(len(shares))]


def rank(key: str) -> bytes:
    """Hash by which an item is ranked for a division."""
    return hashlib.sha256(f"{SPLIT_SEED} {key}".encode()).digest()


def parts_by_rank(sizes: Mapping[bytes, int], shares: Sequence[float]) -> dict[bytes, int]:
    """The part of each rank, if so many items have it; see :func:`divide`."""
    ranked, total = sorted(sizes), sum(sizes.values())
    ends = accumulate(sizes[name] for name in ranked)
    edges = list(accumulate(shares))[:-1]
    return {name: bisect_right(edges, (end - sizes[name] / 2) / total) for name, end in zip(ranked, ends, strict=True)}


def content_key(item: Item) -> str:
    """Key of an item's text, which keeps items of the same text together."""
    return repr((item.prompt.text, item.options))


def digest(text: str) -> str:
    """SHA-256 in hexadecimal: a hash that is the same on every machine and in every process."""
    return hashlib.sha256(text.encode()).hexdigest()
