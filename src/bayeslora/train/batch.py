"""Answers to a file of questions: in their order, some at a time, and from where it was left off.

A line that cannot be answered costs no other: its answer says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from bayeslora.errors import InputError
from bayeslora.files import write_json
from bayeslora.tasks import Item, encode_items
from bayeslora.tasks.file import question_item
from bayeslora.tasks.sources import parse_object, read_lines
from bayeslora.train.trained import TrainedModel

CHUNK = 256
"""Lines in memory at a time. They are answered together, sorted by length."""


@dataclass(frozen=True)
class Line:
    """A line of the input: a question, or why it is none."""

    number: int
    item: Item | None = None
    error: str | None = None


def answer_file(trained: TrainedModel, source: Path, level: float, skip: int = 0) -> Iterator[dict[str, Any]]:
    """An answer for every line that is not blank, as JSON can hold it, without the first ``skip`` of them."""
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


class AnswerFile:
    """Where answers are written. Until all are there it is called ``.partial``, and the same settings go on with it.

    Args:
        path: of the finished file.
        settings: what the answers depend on; another run's partial file is not gone on with.
        force: begin anew, whatever is there.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, force: bool) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._settings = path.with_name(f"{path.name}.partial.json")
        if path.exists() and not force:
            raise InputError(f"{path}: is there already; choose another file, or use --force to replace it")
        if force:
            self._partial.unlink(missing_ok=True)
        elif self._partial.exists() and self._read_settings() != settings:
            raise InputError(
                f"{self._partial}: holds answers that were made otherwise; remove it, or use --force to begin anew"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._settings, settings)

    def __enter__(self) -> AnswerFile:
        self._file: IO[bytes] = self._partial.open("a+b")
        self._file.seek(0)
        self.done = self.failed = size = 0
        for line in self._file:
            if line.endswith(b"\n"):
                self.done, self.failed, size = self.done + 1, self.failed + _is_failure(line), size + len(line)
        self._file.truncate(size)  # without a line that was being written when the process died
        return self

    def write(self, answer: dict[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done += 1
        self.failed += "error" in answer

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._partial, self._path)
            self._settings.unlink()

    def _read_settings(self) -> Any:
        try:
            return json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def _is_failure(line: bytes) -> bool:
    return "error" in json.loads(line)
