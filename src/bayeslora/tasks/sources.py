"""Sources of rows: a local directory of JSON lines, or data sets on the Hugging Face hub.

A data directory is laid out as ``arc_easy/train.jsonl.gz`` (or ``.jsonl``), one row per line. Each family maps rows of the
hub into the same fields, so that other modules do not depend on the source.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bayeslora.errors import InputError, did_you_mean, first_line
from bayeslora.hub_access import hub_or_cache
from bayeslora.tasks.rows import Row

SUFFIXES = (".jsonl.gz", ".jsonl")
"""Suffixes of data files; the first that exists is used."""

LONGEST_LINE = 2**24
"""Longest line of JSON in characters. A question takes a few thousand; a small gzip file can unpack to gigabytes."""

LARGEST_UNPACKED = 2**32
"""Largest unpacked size of a gzip file in characters."""


@dataclass(frozen=True)
class Source:
    """One official split: a file below the data directory, and its place on the hub.

    A benchmark may be spread over several configurations of a data set. If all of them share one local file,
    ``config_field`` names the field that distinguishes their rows.
    """

    file: str
    hub: str
    configs: tuple[str | None, ...]
    split: str
    config_field: str | None = None


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Position of a row on the hub."""

    config: str | None
    split: str
    index: int


HubRow = Callable[[Mapping[str, Any], HubPlace], dict[str, Any]]
"""Maps a row of the hub into the fields of the local files."""


def read_source(source: Source, data_dir: Path | None, hub_row: HubRow) -> list[Row]:
    """All rows, from the data directory if there is one, else from the hub."""
    rows = _read_hub(source, hub_row) if data_dir is None else _read_local(source, data_dir)
    if not rows:
        where = source.hub if data_dir is None else data_dir / source.file
        wanted = f" of {', '.join(map(str, source.configs))}" if source.config_field else ""
        raise InputError(f"{where}: split {source.split!r} has no rows{wanted}; get the data again")
    return rows


def check_data_dir(data_dir: Path) -> Path:
    """Return the data directory if it exists; otherwise raise."""
    path = data_dir.expanduser()
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "no such directory"
        raise InputError(f"{path}: {what}; pass the directory with the data sets as --data-dir, or leave it out")
    return path


def find_file(stem: Path, suffixes: Sequence[str] = SUFFIXES) -> Path | None:
    """The file with this name and one of the known suffixes."""
    return next((path for suffix in suffixes if (path := stem.with_name(stem.name + suffix)).is_file()), None)


def read_json_lines(path: Path) -> list[Row]:
    """Read one row per non-blank line; every error names the file, and the line if there is one."""
    return [
        Row(parse_object(line, f"{path}, line {number}"), f"{path}, line {number}") for number, line in read_lines(path)
    ]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines of a file with their numbers."""
    return ((number, line) for number, line in enumerate(all_lines(path, LONGEST_LINE), 1) if line.strip())


def all_lines(path: Path, longest: int = LARGEST_UNPACKED) -> Iterator[str]:
    """Yield the unchanged lines of a file; every error names the file, including that of a line that is too long."""
    try:
        with _open(path) as file:
            yield from _bounded(file, path, longest)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is not a complete gzip file ({first_line(error)}); get it again") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from error


def _bounded(file: IO[str], path: Path, longest: int) -> Iterator[str]:
    """Yield lines; raise if a line or the unpacked size of a gzip file exceeds its bound."""
    number, total, bound = 0, 0, LARGEST_UNPACKED if path.suffix == ".gz" else None
    while line := file.readline(longest + 1):
        number, total = number + 1, total + len(line)
        if len(line) > longest:
            raise InputError(
                f"{path}, line {number}: has more than {longest} characters; give one JSON object per line"
            )
        if bound is not None and total > bound:
            raise InputError(f"{path}: unpacks to more than {bound} characters; divide it, or give it unpacked")
        yield line


def _open(path: Path) -> IO[str]:
    """Open as text without a byte-order mark, with only line feeds as line ends."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def parse_object(line: str, origin: str) -> dict[str, Any]:
    """Parse the JSON object of a line; ``origin`` names the line in errors."""
    try:
        values = OBJECTS.decode(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{origin}: is not valid JSON ({first_line(error)}); give one JSON object per line") from error
    if not isinstance(values, _Pairs):
        raise InputError(f"{origin}: is a JSON {type(values).__name__}; give one JSON object per line")
    if values.twice:
        raise InputError(f"{origin}: has the field {values.twice[0]!r} twice; keep one of them")
    return dict(values)


class _Pairs(dict[str, Any]):
    """A JSON object that knows which of its names were given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]


OBJECTS = json.JSONDecoder(object_pairs_hook=_Pairs)
"""Decodes JSON; objects are :class:`_Pairs`."""


def _read_local(source: Source, data_dir: Path) -> list[Row]:
    path = find_file(data_dir / source.file)
    if path is None:
        folder = source.file.partition("/")[0]
        present = sorted(entry.name for entry in data_dir.iterdir() if entry.is_dir())
        hint = "" if folder in present else did_you_mean(folder, present)
        names = " or ".join(source.file + suffix for suffix in SUFFIXES)
        raise InputError(f"{data_dir}: has no {names}; pass the directory that holds it as --data-dir{hint}")
    rows = read_json_lines(path)
    if source.config_field is None:
        return rows
    return [row for row in rows if row.values.get(source.config_field) in source.configs]


def _read_hub(source: Source, hub_row: HubRow) -> list[Row]:
    if importlib.util.find_spec("datasets") is None:
        raise InputError(
            f"{source.hub}: reading the hub needs the package datasets; run: pip install datasets, "
            "or pass --data-dir with local copies"
        )
    return [row for config in source.configs for row in _hub_rows(source, config, hub_row)]


def _hub_rows(source: Source, config: str | None, hub_row: HubRow) -> Iterator[Row]:
    name = f"{source.hub} {config}" if config else source.hub
    try:
        with hub_or_cache():
            table = importlib.import_module("datasets").load_dataset(source.hub, config, split=source.split)
    except Exception as error:  # the library raises many types; all of them mean missing data
        raise InputError(
            f"{name}: cannot be loaded from the hub ({first_line(error)}); check the network, "
            "or pass --data-dir with local copies"
        ) from error
    for index, values in enumerate(table):
        place = HubPlace(config, source.split, index)
        try:
            yield Row(hub_row(values, place), f"{name} {source.split}, row {index}")
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{name} {source.split}, row {index}: does not have the expected fields ({error!r}); "
                "the data set has changed, so pass --data-dir with local copies"
            ) from error
