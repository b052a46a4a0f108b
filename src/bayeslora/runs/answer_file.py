"""A file of answers, one JSON line each, that can be resumed after an interruption."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from bayeslora.atomic_files import create, write_json
from bayeslora.errors import InputError


class AnswerFile:
    """Writes answers to a file that is named ``.partial`` until complete; the same settings resume it. A failure before the first
    answer leaves nothing behind.

    Args:
        path: of the finished file.
        settings: all that the answers depend on; a partial file with other settings is not resumed.
        chunk: number of answers computed together. A chunk is kept whole or dropped, so that a resumed process groups
            questions as an uninterrupted one does, with bit-identical results.
        force: start again, replacing existing files.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, chunk: int = 1, force: bool) -> None:
        self._path, self._chunk = path, chunk
        self._partial = path.with_name(f"{path.name}.partial")
        self._settings = path.with_name(f"{path.name}.partial.json")
        self._lock = FileLock(path.with_name(f"{path.name}.partial.lock"))
        if path.is_dir():
            raise InputError(f"{path}: is a directory; choose a file in it")
        if path.exists() and not force:
            raise InputError(f"{path}: exists already; choose another file, or use --force to replace it")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise InputError(f"{path}: another process is writing it; wait for it, or choose another file") from None
        if force or self._partial.is_symlink():
            self._partial.unlink(missing_ok=True)
        elif self._partial.exists() and self._read_settings() != settings:
            self._unlock()
            raise InputError(
                f"{self._partial}: holds answers made with other settings; remove it, or use --force to start again"
            )
        write_json(self._settings, settings)  # first: answers without settings would look like another run's
        if not self._partial.exists():
            create(self._partial)

    def __enter__(self) -> AnswerFile:
        self._file: IO[bytes] = self._partial.open("a+b")
        self._file.seek(0)
        try:
            lines = [(len(line), _is_failure(line)) for line in self._file if line.endswith(b"\n")]
        except (TypeError, ValueError, RecursionError):
            self._file.close()
            self._unlock()
            raise InputError(f"{self._partial}: is damaged; remove it, or use --force to start again") from None
        kept = lines[: len(lines) // self._chunk * self._chunk]
        self.done, self.failed = len(kept), sum(failed for _, failed in kept)
        self._file.truncate(sum(size for size, _ in kept))
        return self

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer."""
        self._file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done += 1
        self.failed += "error" in answer

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._file.close()
        if kind is None:
            os.replace(self._partial, self._path)
        elif self.done == 0:  # nothing to resume
            self._partial.unlink()
        if not self._partial.exists():
            self._settings.unlink()
        self._unlock()

    def _unlock(self) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def _read_settings(self) -> Any:
        try:
            return json.loads(self._settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def read_answers(path: Path) -> list[dict[str, Any]]:
    """All answers of a finished file. Only a line feed ends a line, since texts may hold other separators of Unicode."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def _is_failure(line: bytes) -> bool:
    return "error" in json.loads(line)
