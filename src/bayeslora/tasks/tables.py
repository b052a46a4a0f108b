"""Files of rows: JSON lines, CSV and Parquet. Every error names the file, and the line or row if there is one."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError, first_line
from bayeslora.tasks.rows import Row
from bayeslora.tasks.sources import LONGEST_LINE, SUFFIXES, all_lines, parse_object, read_lines

CSV = (".csv.gz", ".csv")
PARQUET = (".parquet",)
TABLES = (*SUFFIXES, *CSV, *PARQUET)
"""Suffixes of files of rows."""

CONVERTED = {
    ".tsv": "convert it to CSV with commas, and name it .csv",
    ".json": "write one JSON object per line, and name it .jsonl",
}
"""What becomes of files that look like files of rows, for which another name is not enough."""

SEPARATORS = {";": "';'", "\t": "a tab"}
"""What separates cells instead of a comma in files that are named .csv, and how it is told."""

LISTS = ("messages", "choices", "labels", "prompt", "completion")
"""Fields that may be lists, which CSV has as JSON."""

MESSAGES = ("prompt", "completion")
"""Those of them that are lists of messages or texts, which may look like another list."""

OPTIONAL = ("answer", "labels")
"""Fields that are missing where a cell of CSV is empty."""


def check_table(path: Path) -> None:
    """Refuse a path whose name is not that of a file of rows."""
    if not path.is_file():
        wrong = "is no file" if path.exists() else "no such file"
        raise InputError(f"{path}: {wrong}; pass a file of rows (.jsonl, .csv, .parquet)")
    if path.suffix in CONVERTED:
        raise InputError(f"{path}: {path.suffix} files are not read; {CONVERTED[path.suffix]}")
    if not path.name.endswith(TABLES):
        raise InputError(f"{path}: is not named {', '.join(TABLES)}; pass a file of rows with such a name")


def read_table(path: Path, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file, one by one. ``columns`` are the names that our fields have there, if they have others."""
    if path.name.endswith(SUFFIXES):
        for number, line in read_lines(path):
            yield Row(parse_object(line, f"{path}, line {number}"), f"{path}, line {number}")
    elif path.name.endswith(CSV):
        yield from _csv_rows(path, {theirs: ours for ours, theirs in (columns or {}).items()})
    else:
        yield from _parquet_rows(path)


def _csv_rows(path: Path, ours: Mapping[str, str]) -> Iterator[Row]:
    """Rows below a header. Text in quotes may contain line breaks. ``ours`` are our names of its columns."""
    lines = csv.reader(all_lines(path, LONGEST_LINE), strict=True)
    records = filter(None, _records(lines))  # without empty lines
    try:
        found = next(records, None)
        if found is None:
            return
        header = [name if name in ours else name.strip() for name in found]
        _check_separator(header, f"{path}, line {lines.line_num}")
        _check_names(header, f"{path}, line {lines.line_num}")
        for cells in records:
            origin = f"{path}, line {lines.line_num}"
            if len(cells) != len(header):
                raise InputError(
                    f"{origin}: has {len(cells)} cells under {len(header)} columns; quote cells with commas"
                )
            yield Row({name: _cell(ours.get(name, name), cell) for name, cell in zip_longest(header, cells)}, origin)
    except csv.Error as error:
        if "new-line character" in str(error):
            raise InputError(
                f"{path}, line {lines.line_num}: has a carriage return (CR) outside of quotes, which ends no line; save it with "
                "the line ends LF or CRLF"
            ) from error
        raise InputError(f"{path}, line {lines.line_num}: is not valid CSV ({error}); quote its cells") from error


def _check_separator(header: Sequence[str], where: str) -> None:
    told = next((told for mark, told in SEPARATORS.items() if len(header) == 1 and mark in header[0]), None)
    if told is not None:
        raise InputError(f"{where}: the separator is {told}; save the file with commas between the cells")


def _check_names(names: Sequence[str], where: str) -> None:
    if len(set(names)) < len(names):
        raise InputError(f"{where}: a column is named twice ({', '.join(names)}); rename one")


def _records(lines: Iterator[list[str]]) -> Iterator[list[str]]:
    """Cells of every line, of at most ``LONGEST_LINE`` characters each; the limit of other readers in the process is kept."""
    while True:
        limit = csv.field_size_limit(LONGEST_LINE)
        try:
            cells = next(lines, None)
        finally:
            csv.field_size_limit(limit)
        if cells is None:
            return
        yield cells


def _cell(name: str, cell: str) -> Any:
    """The value of a cell: nothing if it may be missing, JSON for lists, otherwise text."""
    if name in OPTIONAL and not cell:
        return None
    if name in LISTS and cell.startswith("["):
        try:
            found = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        return found if name not in MESSAGES or all(isinstance(it, dict) for it in found) else cell
    return cell


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        _check_names(names, str(path))
        number = 0
        for batch in file.iter_batches():
            columns = [_values(name, column, path) for name, column in zip(names, batch.columns, strict=True)]
            for cells in zip(*columns, strict=True):
                number += 1
                yield Row(dict(zip(names, cells, strict=True)), f"{path}, row {number}")
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: is not a complete Parquet file ({first_line(error)}); get it again") from error


def _values(name: str, column: Any, path: Path) -> list[Any]:
    """The cells of a column. Some have no value in Python, such as dates beyond its calendar and text that is not UTF-8."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError, LookupError) as error:
        raise InputError(
            f"{path}: column {name!r} holds what cannot be read ({first_line(error)}); correct or remove it"
        ) from error
