"""Your own questions: a file of JSON lines, or a directory with one file per split.

A line is ``{"question": ..., "choices": [...]}`` with any of

- ``answer``: a label, the index of a choice (from 0), or a choice's text; leave it out if it is not known;
- ``labels``: one per choice, by default ``A``, ``B``, ``C``, ...;
- ``passage``: a text the question refers to, which is truncated from the left if it is too long;
- ``id``: a name for predictions, by default a digest of the line.

A directory holds ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` (or ``.jsonl.gz``), or those of them that are
used. A single file is divided into 60 % train, 20 % validation and 20 % test by a fixed hash of the text, so neither
order nor repeated lines leak from one part into another. As it is evaluation data too, a malformed line is an error;
:func:`read_items` reads all of it undivided, for prediction.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, did_you_mean
from bayeslora.tasks.base import Item, Prompt, Split, SplitName, Task
from bayeslora.tasks.choices import choice_candidate, text_list
from bayeslora.tasks.rows import Candidate, Malformed, clean, content_key, divide, normalise, row_id, text_field
from bayeslora.tasks.sources import SUFFIXES, find_file, read_json_lines

FIELDS = ("question", "choices", "answer", "labels", "passage", "id")
SHARES: dict[SplitName, float] = {"train": 0.6, "validation": 0.2, "test": 0.2}


def file_task(path: Path) -> Task:
    """The task of a file or a directory, which must exist; its lines are read when a split is loaded."""
    path = path.expanduser()
    if path.is_dir():
        if not any(find_file(path / split) for split in SHARES):
            names = ", ".join(f"{split}.jsonl" for split in SHARES)
            raise InputError(f"{path}: holds none of {names} (or .jsonl.gz); add them, or pass a file")
        return Task(str(path), f"own questions in {path}", lambda split: _read_part(path, split))
    check_file(path)
    return Task(str(path), f"own questions in {path}", lambda split: _divide_file(path, split))


def read_items(path: Path) -> Split:
    """All lines of a file in their order, with or without answers; a malformed line is an error."""
    path = path.expanduser()
    check_file(path)
    return _read(path, drop=False)


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


def read_own(values: Mapping[str, Any]) -> Candidate:
    """Read a line in the format described above."""
    _check_fields(values)
    choices = text_list(values, "choices")
    labels = _labels(values, len(choices))
    answer = values.get("answer")
    gold = None if answer is None else _gold(answer, choices, labels)
    passage = text_field(values, "passage") if values.get("passage") is not None else ""
    return choice_candidate(row_id(values), text_field(values, "question"), choices, labels, gold, passage)


def check_file(path: Path) -> None:
    """Refuse a path whose name is not that of a JSON lines file."""
    if not path.is_file():
        raise InputError(f"{path}: no such file or directory; pass a file of JSON lines or a directory with splits")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"{path}: is not named {' or '.join(SUFFIXES)}; pass a file of JSON lines with such a name")


def _read(path: Path, *, drop: bool) -> Split:
    split = clean(read_json_lines(path), read_own, str(path), drop=drop)
    if not split.items:
        raise InputError(f"{path}: has no questions that can be used; give one JSON object per line")
    return split


def _read_part(directory: Path, split: SplitName) -> Split:
    path = find_file(directory / split)
    if path is None:
        raise InputError(f"{directory}: has no {split}.jsonl (or .jsonl.gz); add it, or use another split")
    return _read(path, drop=split == "train")


def _divide_file(path: Path, split: SplitName) -> Split:
    rows = read_json_lines(path)
    items = clean(rows, read_own, str(path), drop=False).items
    pairs = list(zip(rows, items, strict=True))
    parts = dict(zip(SHARES, divide(pairs, list(SHARES.values()), lambda pair: content_key(pair[1])), strict=True))
    part = clean((row for row, _ in parts[split]), read_own, f"{path} {split}", drop=split == "train")
    if not part.items:
        raise InputError(
            f"{path}: {len(rows)} questions are too few to divide, {split} would be empty; "
            "give at least 5 different ones, or a directory with one file per split"
        )
    return part


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
    if not meant:
        allowed = f"one of {', '.join(labels)}, an index from 0 to {len(choices) - 1}, or the text of a choice"
        raise Malformed("answer is not among the choices", f"{answer!r}; give {allowed}")
    if len(meant) > 1:
        advice = "the label as text" if isinstance(answer, int) else "the index"
        raise Malformed("answer can mean several choices", f"{answer!r}; give {advice}")
    return meant.pop()
