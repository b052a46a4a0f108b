"""Answer a file of questions in order, in chunks, resuming after an interruption.

A line that cannot be answered does not affect others: its answer contains the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, encode_items
from bayeslora.tasks.file import question_item
from bayeslora.tasks.sources import parse_object, read_lines

CHUNK = 256
"""Lines per chunk, which are answered together, sorted by length."""


@dataclass(frozen=True)
class Line:
    """A line of the input: a question, or the error in it."""

    number: int
    item: Item | None = None
    error: str | None = None


def answer_file(trained: TrainedModel, source: Path, level: float, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a JSON-compatible answer for every non-blank line after the first ``skip``."""
    lines = (_read(number, text, source, trained) for number, text in islice(read_lines(source), skip, None))
    while chunk := list(islice(lines, CHUNK)):
        asked = [line.item for line in chunk if line.item is not None]
        answers = iter(trained.answers(trained.predict(asked), level) if asked else ())
        for line in chunk:
            if line.item is None:
                yield {"line": line.number, "error": line.error}
            else:
                yield {"line": line.number, "id": line.item.id, **asdict(next(answers))}


def _read(number: int, text: str, source: Path, trained: TrainedModel) -> Line:
    data, origin = trained.config.data, f"{source}, line {number}"
    try:
        item = question_item(parse_object(text, origin))
        encode_items([item], trained.loaded.tokenizer, data.scoring, data.max_tokens)
    except InputError as error:
        return Line(number, error=f"{origin}: {str(error).removeprefix(f'{origin}: ')}")
    return Line(number, item)
