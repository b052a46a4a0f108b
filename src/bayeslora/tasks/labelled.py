"""Texts to classify: rows of ``text`` and ``label``, as questions whose options are the labels.

Labels are any texts or numbers. All of them must occur in the training data, which defines them.
"""

from __future__ import annotations

import logging
import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bayeslora.errors import InputError
from bayeslora.tasks.base import Item, Prompt
from bayeslora.tasks.rows import Candidate, Malformed, Row, is_missing, normalise, row_id, text_field
from bayeslora.wording import counted

MOST_LABELS = 1000

LOOK_MISSING = ("nan", "none", "null", "n/a")
"""Labels, in small letters, that tables often have where there is none."""

logger = logging.getLogger(__name__)


def label_names(rows: Iterable[Row], where: str) -> tuple[str, ...]:
    """All labels of the training data, sorted: numbers by value, others by name. Those that look missing are warned of."""
    found, wrong = found_labels(rows)
    _warn_of_missing(found, where)
    if len(found) < 2:
        told = wrong or ", ".join(found)
        seen = f" ({told})" if told else ""
        raise InputError(
            f"{where}: has {counted(len(found), 'label')}{seen}; give texts with at least two different labels"
        )
    if len(found) > MOST_LABELS:
        raise InputError(
            f"{where}: has {len(found)} different labels, more than {MOST_LABELS}; if they are free answers, name the fields "
            "question and answer"
        )
    return tuple(sorted(found, key=_numbers_first))


def _warn_of_missing(found: Mapping[str, int], where: str) -> None:
    counts = {name: count for name, count in found.items() if name.lower() in LOOK_MISSING}
    if counts:
        logger.warning(
            "%s: %d of its labels are %s, which becomes a class like any other; if it means that there is no label, leave the "
            "label empty",
            where,
            sum(counts.values()),
            " or ".join(counts),
        )


def found_labels(rows: Iterable[Row]) -> tuple[Counter[str], str]:
    """All labels of some rows with how many rows have them, and what is wrong with the first row whose label is none."""
    found, wrong = Counter[str](), ""
    for row in rows:
        try:
            name = _name(row.values.get("label"))
        except Malformed as problem:  # what becomes of the row is decided where it is read
            wrong = wrong or f"{row.origin}: {problem}"
            continue
        if name is not None:
            found[name] += 1
    return found, wrong


def _numbers_first(name: str) -> tuple[bool, float, str]:
    try:
        value = float(name)
    except ValueError:
        value = math.nan
    return (False, value, name) if math.isfinite(value) else (True, 0.0, name)


def labelled_reader(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Candidate[Item]]:
    """A reader of rows for these labels."""

    def read(values: Mapping[str, Any]) -> Candidate[Item]:
        text, label = text_field(values, "text"), _name(values.get("label"))
        if label is not None and label not in names:
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise Malformed("label is not among those of the training data", f"{values['label']!r} of {shown}")
        item = labelled_item(row_id(values), text, names, None if label is None else names.index(label))
        return Candidate(item, None if text else "empty text")

    return read


def text_item(values: Mapping[str, Any], names: Sequence[str]) -> Item:
    """The text of a row, to be classified by these labels; its own label is not used. Invalid texts are refused."""
    try:
        name, text = row_id(values), text_field(values, "text")
        if not text:
            raise Malformed("empty text")
    except Malformed as error:
        raise InputError(f"the text cannot be used: {error}; give one with words") from None
    return labelled_item(name, text, names)


def labelled_item(name: str, text: str, names: Sequence[str], gold: int | None = None) -> Item:
    """A text to classify. A long one loses its beginning, as passages do."""
    asked = f"Classify the text as one of: {', '.join(names)}.\nText:"
    letters = string.ascii_uppercase[: len(names)] if len(names) <= len(string.ascii_uppercase) else ""
    listed = "".join(f"{letter}. {label}\n" for letter, label in zip(letters, names, strict=False))
    by_letter = Prompt("Text:", f" {text}", f"\nOptions:\n{listed}Answer:") if letters else None
    return Item(
        name,
        Prompt(asked, f" {text}", "\nLabel:"),
        tuple(f" {label}" for label in names),
        tuple(letters or map(str, range(len(names)))),
        gold,
        letter_prompt=by_letter,
    )


def _name(label: Any) -> str | None:
    """A label as text; ``None`` where there is none."""
    if is_missing(label):
        return None
    if isinstance(label, (list, Mapping, bytes)):
        raise Malformed("label is no text or number", repr(label)[:60])
    if isinstance(label, bool):
        return str(label).lower()
    return normalise(str(label)) or None
