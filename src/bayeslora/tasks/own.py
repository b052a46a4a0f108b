"""Your own data: a file, a directory of splits, or a data set of the hub. Their fields say what kind of task they are:

==========================  =========================================================================
fields of a row             task
==========================  =========================================================================
messages                    conversations, of which the assistant's turns are learnt
prompt, completion          texts to complete, of which the completion is learnt
question, choices           questions with options, with an answer for training and evaluation
text, label                 texts to classify
question, answer            questions with a short free answer
text                        running text, packed into blocks
==========================  =========================================================================

Files are JSON lines, CSV or Parquet. A directory holds ``train``, ``validation`` and ``test``, or those of them that are used.
A single file is divided into 60 % train, 20 % validation and 20 % test by a fixed hash of what a row says, so neither order
nor repeated rows leak from one part into another.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from bayeslora.errors import InputError, did_you_mean, first_line
from bayeslora.hub_access import hub_or_cache
from bayeslora.tasks.answers import AnswerTask, answer_key, read_free_answer
from bayeslora.tasks.base import SPLITS, FromRow, Split, SplitName, Task
from bayeslora.tasks.conversations import ConversationTask, example_key, read_completion, read_conversation
from bayeslora.tasks.file import FIELDS, SHARES, read_own
from bayeslora.tasks.labelled import found_labels, label_names, labelled_reader
from bayeslora.tasks.misnamed import columns_option, looks_like
from bayeslora.tasks.rows import (
    Items,
    Reader,
    Row,
    content_key,
    is_missing,
    parts_by_rank,
    rank,
    usable,
    warn_of_left_out,
)
from bayeslora.tasks.sources import find_file
from bayeslora.tasks.tables import TABLES, check_table, read_table
from bayeslora.tasks.text import DocumentTask, document_key, read_document
from bayeslora.tasks.tokens import TokenTask
from bayeslora.wording import counted

T = TypeVar("T", bound=FromRow)

HELD_OUT = 0.2
"""Share of train that becomes validation where a data set of the hub has none."""

OTHER_NAMES: Mapping[SplitName, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""Names that splits have on the hub."""


@dataclass(frozen=True)
class OwnFormat:
    """How own data differ from what is expected.

    Attributes:
        columns: names that our fields have in the data: ``{"question": "query"}``; an empty name for a field that is not used.
        config: configuration of a data set of the hub.
        splits: names that our splits have there: ``{"train": "train_sft"}``.
        labels: of a run that classifies texts: the options of texts that have no other labels.
        known: whether the kind of data is known, as for a run that is trained: other columns are then not looked at.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    known: bool = False

    def __post_init__(self) -> None:
        for name in self.columns:
            if name not in KNOWN:
                raise InputError(f"columns names {name!r}{did_you_mean(name, KNOWN)}; choose {', '.join(KNOWN)}")
        for name in self.splits:
            if name not in SPLITS:
                raise InputError(f"splits names {name!r}{did_you_mean(name, SPLITS)}; choose {', '.join(SPLITS)}")


@dataclass(frozen=True)
class OwnRows:
    """Rows of own data.

    Attributes:
        name: path or hub id, as given.
        parts: reads the rows of each split that there is.
        whole: reads all rows, if they are not divided yet.
        missing: error message for a split that there is not, with ``{split}`` for its name.
        labels: as in :class:`OwnFormat`.
        about: what kind of rows they are, and which of their columns are not used.
    """

    name: str
    parts: Mapping[SplitName, Callable[[], Iterable[Row]]]
    whole: Callable[[], Iterable[Row]] | None = None
    missing: str = ""
    labels: tuple[str, ...] = ()
    about: str = ""

    def all(self) -> Iterator[Row]:
        """The rows of all splits."""
        readers = [*self.parts.values(), *([self.whole] if self.whole else [])]
        return (row for read in readers for row in read())

    def first(self) -> Row:
        """The first row of all."""
        row = next(self.all(), None)
        if row is None:
            raise InputError(f"{self.name}: has no rows; give one JSON object per line, or a table with a header")
        return row

    def training(self) -> Iterable[Row]:
        """The rows of the training split, or all if they are not divided yet."""
        read = self.whole or self.parts.get("train")
        if read is None:
            raise InputError(self.missing.replace("{split}", "train"))
        return read()

    def load(
        self, split: SplitName, read: Reader[T], key: Callable[[T], str], noun: str
    ) -> tuple[tuple[T, ...], dict[str, int]]:
        """The items of a split, and how many rows were left out by reason."""
        items = self.items(split, read, key, noun)
        return tuple(items), dict(items.left_out)

    def items(self, split: SplitName, read: Reader[T], key: Callable[[T], str], noun: str) -> Items[T]:
        """The items of a split, which are read anew in every pass."""
        rows = self._divided(split, read, key) if self.whole is not None else self.parts.get(split)
        if rows is None:
            raise InputError(self.missing.replace("{split}", split))
        drop, where = split == "train", f"{self.name} {split}"
        found = Items(lambda counts: usable(rows(), read, key, counts, drop=drop))
        warn_of_left_out(where, found.left_out)
        if not found and self.whole is not None and not found.left_out:
            total = counted(sum(1 for _ in self.whole()), noun.removesuffix("s"))
            raise InputError(
                f"{self.name}: has {total}, too few to divide: {split} would be empty; "
                "give at least 5 different ones, or a directory with one file per split"
            )
        if not found:
            why = f" ({', '.join(found.left_out)})" if found.left_out else ""
            raise InputError(f"{where}: has no {noun} that can be used{why}; correct its rows, or give others")
        return found

    def _divided(self, split: SplitName, read: Reader[T], key: Callable[[T], str]) -> Callable[[], Iterable[Row]]:
        """Reads the rows of a part of the whole."""
        assert self.whole is not None
        keys = map(key, usable(self.whole(), read, key, Counter(), drop=False))
        return _part(self.whole, keys, list(SHARES.values()), list(SHARES).index(split))


def _part(
    whole: Callable[[], Iterable[Row]], keys: Iterable[str], shares: Sequence[float], wanted: int
) -> Callable[[], Iterator[Row]]:
    """Reads the rows of one part, by the keys of all rows. Of each row a hash is kept in memory."""
    ranks = list(map(rank, keys))
    part = parts_by_rank(Counter(ranks), shares)
    return lambda: (row for row, own in zip(whole(), ranks, strict=True) if part[own] == wanted)


# Kinds of tasks -------------------------------------------------------------------------------------------------------


def _questions(rows: OwnRows) -> Task:
    return Task(
        rows.name,
        rows.about,
        lambda split: Split(*rows.load(split, read_own, content_key, "questions")),
    )


def _labelled(rows: OwnRows) -> Task:
    @cache
    def names() -> tuple[str, ...]:
        known = bool(rows.labels) and found_labels(rows.all())[0].keys() <= set(rows.labels)
        return rows.labels if known else label_names(rows.training(), rows.name)

    def read(split: SplitName) -> Split:
        return Split(*rows.load(split, labelled_reader(names()), content_key, "texts"))

    return Task(rows.name, rows.about, read, kind="labels")


def _token_task(
    make: Callable[..., TokenTask[Collection[T]]], read: Reader[T], key: Callable[[T], str], noun: str
) -> Callable[[OwnRows], TokenTask[Collection[T]]]:
    def task(rows: OwnRows) -> TokenTask[Collection[T]]:
        items = cache(lambda split: rows.items(split, read, key, noun))
        return make(
            rows.name,
            rows.about,
            # training data may be larger than memory; what is evaluated is kept
            lambda split: items(split) if split == "train" else tuple(items(split)),
            rows_left_out=lambda split: items(split).left_out,
        )

    return task


@dataclass(frozen=True)
class Shape:
    """A kind of rows.

    Attributes:
        needs: the fields that it needs.
        kind: what such rows are.
        task: the task of such rows.
        uses: further fields that mean something in them.
    """

    needs: tuple[str, ...]
    kind: str
    task: Callable[[OwnRows], Task | TokenTask[Any]]
    uses: tuple[str, ...] = ("id",)


SHAPES = (
    Shape(
        ("messages",),
        "conversations",
        _token_task(ConversationTask, read_conversation, example_key, "conversations"),
        ("tools", "id"),
    ),
    Shape(
        ("prompt", "completion"),
        "prompts with completions",
        _token_task(ConversationTask, read_completion, example_key, "completions"),
        ("tools", "id"),
    ),
    Shape(("question", "choices"), "questions with choices", _questions, FIELDS),
    Shape(("text", "label"), "texts to classify", _labelled),
    Shape(
        ("question", "answer"),
        "questions with free answers",
        _token_task(AnswerTask, read_free_answer, answer_key, "questions"),
        ("passage", "id"),
    ),
    Shape(("text",), "running text", _token_task(DocumentTask, read_document, document_key, "texts")),
)
"""All shapes. The first whose fields are there is taken."""

KNOWN = tuple(dict.fromkeys(name for shape in SHAPES for name in (*shape.needs, *shape.uses)))
"""All fields that mean something."""


def own_task(rows: OwnRows, how: OwnFormat) -> Task | TokenTask[Any]:
    """The task of own data, recognised by the fields of the first row."""
    first = rows.first()
    shape = next((it for it in SHAPES if set(it.needs) <= set(first.values)), None)
    if shape is None:
        hints = [hint for name in first.values if name not in KNOWN and (hint := did_you_mean(str(name), KNOWN))]
        wanted = ", or ".join(" and ".join(it.needs) for it in SHAPES)
        given = ", ".join(map(str, first.values)) or "none"
        raise InputError(
            f"{first.origin}: its fields are {given}{''.join(hints)}; a row needs {wanted}; if yours have other names, map "
            "them with --columns, such as question=query"
        )
    unused = [str(name) or "(without a name)" for name in first.values if name not in (*shape.needs, *shape.uses)]
    if not how.known:
        _require_no_misnamed(first, shape, [it for it in unused if not is_missing(first.values.get(it))], how.columns)
    told = f"; columns not used: {', '.join(unused)}" if unused else ""
    return shape.task(replace(rows, labels=how.labels, about=f"{shape.kind} in {rows.name}{told}"))


def _require_no_misnamed(first: Row, shape: Shape, unused: Sequence[str], columns: Mapping[str, str]) -> None:
    """Refuse an unused column that looks like the one field that a more specific shape lacks."""
    for better in SHAPES[: SHAPES.index(shape)]:
        missing = [name for name in better.needs if name not in first.values]
        if len(missing) == len(better.needs) or missing[0] in columns:
            continue
        if column := looks_like(missing[0], unused):
            raise InputError(
                f"{first.origin}: the column {column!r} looks like {missing[0]!r}, but is not used for {shape.kind}; for "
                f"{better.kind} give {columns_option({**columns, missing[0]: column})}; to leave it out give "
                f"{columns_option({**columns, missing[0]: ''})}"
            )


# Places ---------------------------------------------------------------------------------------------------------------


def file_rows(path: Path, how: OwnFormat) -> OwnRows:
    """Rows of a file, or of a directory with one file per split."""
    path = path.expanduser()
    if path.is_dir():
        stems: dict[SplitName, str] = {split: how.splits.get(split, split) for split in SPLITS}
        files = {split: file for split, stem in stems.items() if (file := find_file(path / stem, TABLES))}
        if not files:
            names = ", ".join(f"{stem}.jsonl" for stem in stems.values())
            raise InputError(f"{path}: holds none of {names} (or .csv, .parquet); add them, or pass a file")
        missing = f"{path}: has no {{split}}.jsonl (or .csv, .parquet); add it, or use another split"
        return OwnRows(str(path), {split: _reader(file, how) for split, file in files.items()}, missing=missing)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory; pass a file of rows or a directory with splits")
    check_table(path)
    return OwnRows(str(path), {}, _reader(path, how))


def _reader(path: Path, how: OwnFormat) -> Callable[[], Iterator[Row]]:
    return lambda: (_renamed(row, how.columns) for row in read_table(path, how.columns))


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """A row with our names of its fields, all of which it must have."""
    for theirs in filter(None, columns.values()):
        if theirs not in row.values:
            hint = did_you_mean(theirs, list(map(str, row.values)))
            named = columns_option({ours: ours if ours in row.values else "NAME" for ours in columns})
            raise InputError(
                f"{row.origin}: has no field {theirs!r}{hint}; it has {', '.join(map(str, row.values))}; say what its fields are "
                f"called with {named}"
            )
    return Row(rename_fields(row.values, columns), row.origin)


def rename_fields(values: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The values with our names of those fields that have others, as in ``{"question": "query"}``, and without those that have
    an empty one."""
    found = {ours: theirs for ours, theirs in columns.items() if theirs and theirs in values}
    taken = {*found, *found.values(), *(ours for ours, theirs in columns.items() if not theirs)}
    kept = {name: value for name, value in values.items() if name not in taken}
    return {**kept, **{ours: values[theirs] for ours, theirs in found.items()}}


def hub_rows(name: str, how: OwnFormat) -> OwnRows:
    """Rows of a data set of the hub. Without a validation split, a part of train is held out; with train alone, it is divided."""
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"{name}: reading the hub needs the package datasets; run: pip install datasets")
    tables = cache(lambda: _load_hub(name, how))
    found = {split: theirs for split in SPLITS if (theirs := _hub_split(split, tables(), how)) is not None}
    if not found:
        raise InputError(
            f"{name}: has the splits {', '.join(tables())}; say which are meant with --dataset-splits, such as "
            f"train={next(iter(tables()))}"
        )

    def reader(theirs: str) -> Callable[[], Iterator[Row]]:
        return lambda: _hub_table(tables()[theirs], f"{name} {theirs}", how)

    missing = f"{name}: has no split for {{split}}, only {', '.join(tables())}; name one with --dataset-splits, or use another"
    if list(found) == ["train"]:
        return OwnRows(name, {}, reader(found["train"]))
    parts: dict[SplitName, Callable[[], Iterable[Row]]] = {split: reader(theirs) for split, theirs in found.items()}
    if "validation" not in parts and "train" in parts:
        whole = parts["train"]
        parts["validation"], parts["train"] = _held_out(whole, 0), _held_out(whole, 1)
    return OwnRows(name, parts, missing=missing)


def _held_out(whole: Callable[[], Iterable[Row]], wanted: int) -> Callable[[], Iterator[Row]]:
    """Reads the part that is held out for validation, or the other."""

    @cache
    def part() -> Callable[[], Iterator[Row]]:
        keys = (repr(sorted(row.values.items(), key=str)) for row in whole())
        return _part(whole, keys, (HELD_OUT, 1 - HELD_OUT), wanted)

    return lambda: part()()


def _hub_split(split: SplitName, tables: Mapping[str, Any], how: OwnFormat) -> str | None:
    if split in how.splits:
        if how.splits[split] not in tables:
            raise InputError(f"there is no split {how.splits[split]!r}, only {', '.join(tables)}; choose one of these")
        return how.splits[split]
    return next((name for name in OTHER_NAMES[split] if name in tables), None)


def _load_hub(name: str, how: OwnFormat) -> Mapping[str, Any]:
    try:
        with hub_or_cache():
            return importlib.import_module("datasets").load_dataset(name, how.config)
    except Exception as error:  # the library raises many types; all of them mean missing data
        raise InputError(
            f"{name}: is not a file or directory here, and cannot be loaded from the hub ({first_line(error)}); check the name, "
            "the network and --dataset-config"
        ) from error


def _hub_table(table: Any, where: str, how: OwnFormat) -> Iterator[Row]:
    """Rows of a table. Labels that are stored as numbers get their names."""
    names: Mapping[str, Sequence[str]] = {
        column: feature.names for column, feature in table.features.items() if hasattr(feature, "names")
    }
    for number, values in enumerate(table, 1):
        named = {
            column: names[column][value] if column in names and isinstance(value, int) and value >= 0 else value
            for column, value in values.items()
        }
        yield _renamed(Row(named, f"{where}, row {number}"), how.columns)
