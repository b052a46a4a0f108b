"""Read the files of runs and studies; errors are reported in one line that names the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult

TOLERANCE = 1e-6
"""Tolerance between recomputed and saved metrics."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    with checking(path):
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise TypeError("no JSON object")
        return record


def read_result(directory: RunDirectory) -> RunResult:
    """Read the result of a run or of an evaluation."""
    return RunResult.read(read_record(directory.result), directory.result)


@contextmanager
def checking(path: Path) -> Iterator[None]:
    """Inside the block, missing and invalid entries raise an error that names the file."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; restore it, or run its command again") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path}: is not as bayeslora wrote it ({reason}); restore it, or run its command again"
        ) from error


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The entries of a record as floats."""
    return {str(name): float(value) for name, value in record.items()}


def require_equal(path: Path, saved: Mapping[str, float], again: Mapping[str, float]) -> None:
    """Refuse saved metrics that differ from those of the saved predictions."""
    for name, value in again.items():
        if name in saved and abs(saved[name] - value) > TOLERANCE * max(1.0, abs(value)):
            raise InputError(
                f"{path}: says {name} {saved[name]:.6g}, but the predictions beside it give {value:.6g}; they do not belong "
                "together, run its command again"
            )


def file_names(titles: Iterable[str]) -> dict[str, str]:
    """Unique plain file names by title."""
    found: dict[str, str] = {}
    for title in titles:
        plain = re.sub(r"[^a-z0-9]+", "-", title.replace("→", "to").lower()).strip("-")[:60] or "part"
        name, number = plain, 2
        while name in found.values():
            name, number = f"{plain}-{number}", number + 1
        found[title] = name
    return found
