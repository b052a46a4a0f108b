"""Your own questions with options, as rows of a file. Where the rows come from is the affair of :mod:`bayeslora.tasks.own`.

A row is ``{"question": ..., "choices": [...]}`` with any of

- ``answer``: a label, the index of a choice (from 0), or a choice's text; leave it out if it is not known;
- ``labels``: one per choice, by default ``A``, ``B``, ``C``, ...;
- ``passage``: a text the question refers to, which is truncated from the left if it is too long;
- ``id``: a name for predictions, by default a digest of the row.

:func:`read_items` reads all rows undivided, for prediction.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.tasks.base import Item, Prompt, Split, SplitName
from bayeslora.tasks.choices import choice_candidate, text_list
from bayeslora.tasks.rows import Candidate, Malformed, clean, normalise, row_id, text_field
from bayeslora.tasks.tables import check_table, read_table

FIELDS = ("question", "choices", "answer", "labels", "passage", "id")
MOST_DIGITS = 9
"""Longest index of a choice, in digits."""

SHARES: dict[SplitName, float] = {"train": 0.6, "validation": 0.2, "test": 0.2}


def read_items(path: Path) -> Split:
    """All lines of a file in their order, with or without answers; a malformed line is an error."""
    path = path.expanduser()
    check_table(path)
    split = clean(read_table(path), read_own, str(path), drop=False)
    if not split.items:
        raise InputError(f"{path}: has no questions that can be used; give one JSON object per line")
    return split


def make_item(question: str, choices: Sequence[str], passage: str = "", *, bare: bool = False) -> Item:
    """One question without an answer, for prediction; if ``bare``, without a template, with the choices as continuations."""
    if isinstance(choices, str):
        raise InputError(f"choices is one text, {choices!r}; give a list of two choices or more")
    if bare and passage:
        raise InputError("a bare question has no passage; put the text in front of it")
    item = question_item({"question": question, "choices": list(choices), "passage": passage})
    return replace(item, prompt=Prompt(normalise(question))) if bare else item


def question_item(values: Mapping[str, Any]) -> Item:
    """The question of a line, with or without an answer; invalid questions are refused."""
    try:
        candidate = read_own(values)
    except Malformed as error:
        raise InputError(f"the question cannot be used: {error}; give a question and two choices or more") from None
    if candidate.flaw is not None:
        raise InputError(f"the question cannot be used: {candidate.flaw}; give a question and two choices or more")
    options = candidate.item.options
    if len(set(options)) < len(options):
        twice = next(option for k, option in enumerate(options) if option in options[:k])
        raise InputError(f"two choices are equal: {twice.strip()!r}; give each once")
    return candidate.item


def read_own(values: Mapping[str, Any]) -> Candidate[Item]:
    """Read a line in the format described above."""
    _check_fields(values)
    choices = text_list(values, "choices")
    labels = _labels(values, len(choices))
    answer = values.get("answer")
    gold = None if answer is None or not choices else _gold(answer, choices, labels)
    passage = text_field(values, "passage") if values.get("passage") is not None else ""
    return choice_candidate(row_id(values), text_field(values, "question"), choices, labels, gold, passage)


def _check_fields(values: Mapping[str, Any]) -> None:
    """Refuse a field that looks misspelt, more readily if the correct field is missing; other fields are ignored."""
    missed = [name for name in ("question", "choices", "answer") if name not in values]
    others = [name for name in ("labels", "passage") if name not in values]
    for name in values:
        if name in FIELDS:
            continue
        hint = did_you_mean(name, missed) or did_you_mean(name, others, cutoff=0.85)
        if hint:
            raise Malformed("unknown field", f"{name!r}{hint}")


def _labels(values: Mapping[str, Any], count: int) -> list[str]:
    if values.get("labels") is not None:
        return text_list(values, "labels")
    if count > len(string.ascii_uppercase):
        raise Malformed("more than 26 choices need 'labels'", f"{count} choices")
    return list(string.ascii_uppercase[:count])


def _gold(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int:
    """Index of the choice that an answer means; ambiguous answers are refused."""
    if isinstance(answer, bool) or not isinstance(answer, (int, str)):
        raise Malformed("answer is no label, index or text", repr(answer)[:60])
    text = normalise(str(answer))
    meant = {index for index, names in enumerate(zip(labels, choices, strict=False)) if text in names}
    if isinstance(answer, int):
        meant = {index for index in meant if labels[index] == text} | ({answer} & set(range(len(choices))))
    elif not meant and text.isdecimal() and len(text) <= MOST_DIGITS:  # tables have all values as text
        meant = {int(text)} & set(range(len(choices)))
    if not meant:
        allowed = f"one of {', '.join(labels)}, an index from 0 to {len(choices) - 1}, or the text of a choice"
        raise Malformed("answer is not among the choices", f"{repr(answer)[:60]}; give {allowed}")
    if len(meant) > 1:
        advice = "the label as text" if isinstance(answer, int) else "the index"
        raise Malformed("answer can mean several choices", f"{answer!r}; give {advice}")
    return meant.pop()
