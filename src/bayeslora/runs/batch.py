"""Answer a file of questions in order, in chunks, resuming after an interruption.

A line that cannot be answered does not affect others: its answer contains the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice, starmap
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.progress import Silent
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item
from bayeslora.tasks.own import rename_fields
from bayeslora.tasks.sources import SUFFIXES, parse_object, read_lines
from bayeslora.tasks.tables import read_table

CHUNK = 16
"""Lines per chunk, which are answered together, sorted by length: a few seconds of work on a CPU."""

MORE = 16
"""Chunks that a GPU answers together."""


@dataclass(frozen=True)
class Line:
    """A line of the input: a question, or the error in it."""

    number: int
    item: Item | None = None
    error: str | None = None


def answer_file(trained: TrainedModel, source: Path, level: float, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a JSON-compatible answer for every non-blank line after the first ``skip``; a file without any is refused.

    Fields may have the names that those of the training data had.
    """
    size = CHUNK if trained.model.device.type == "cpu" else MORE * CHUNK
    begin = skip // size * size  # lines that were answered together are so again, for the same results
    return islice(_answers(trained, source, level, size, begin), skip - begin, None)


def _answers(trained: TrainedModel, source: Path, level: float, size: int, begin: int) -> Iterator[dict[str, Any]]:
    """Answers to the lines from ``begin`` on, so many at a time."""
    predictor, columns = trained.predictor(), trained.config.data.columns

    def read(origin: str, values: str | Mapping[str, Any]) -> Line:
        number = int(origin.rpartition(" ")[2])
        try:
            row = parse_object(values, origin) if isinstance(values, str) else values
            item = trained.item_of(rename_fields(row, columns))
            predictor.encode([item])
        except InputError as error:
            return Line(number, error=f"{origin}: {str(error).removeprefix(f'{origin}: ')}")
        return Line(number, item)

    total = sum(1 for _ in _values(source, columns))
    if not total:
        raise InputError(f"{source}: holds no questions; give one JSON object per line, or a table with a header")
    advance, silent = trained.report.stage("predicting"), replace(trained, report=Silent())
    lines, done = starmap(read, islice(_values(source, columns), begin, None)), begin
    while chunk := list(islice(lines, size)):
        advance(done, total)
        asked = [line.item for line in chunk if line.item is not None]
        answers = iter(trained.answers(silent.predict(asked), level) if asked else ())
        for line in chunk:
            if line.item is None:
                yield {"line": line.number, "error": line.error}
            else:
                yield {"line": line.number, "id": line.item.id, **asdict(next(answers))}
        done += len(chunk)
    advance(total, total)


def _values(source: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """Places and contents of the rows: lines of JSON as text, rows of a table as values."""
    if source.name.endswith(SUFFIXES):
        return ((f"{source}, line {number}", line) for number, line in read_lines(source))
    return ((row.origin, row.values) for row in read_table(source, columns))
