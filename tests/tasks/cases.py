"""Rows, files and data shared by the tests of the tasks."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bayeslora.errors import InputError

PROJECT = Path(__file__).parents[2]
DATA = Path(os.environ.get("BAYESLORA_DATA_DIR") or PROJECT / ".." / "shared" / "data").resolve()

needs_data = pytest.mark.skipif(
    not (DATA / "arc_easy").is_dir(), reason=f"no benchmark data in {DATA}; set BAYESLORA_DATA_DIR to their directory"
)


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines, packed if the name says so; a text among the rows is written as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    data = "".join(f"{line}\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def failure(action: Any) -> str:
    """The one line that an action is refused with."""
    with pytest.raises(InputError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    return message


def choice_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A good row of ARC, OpenBookQA or MMLU."""
    row = {
        "id": f"q{number}",
        "question": f"What is {number} plus 1?",
        "choices": [str(number + 1), "a fish", "blue"],
        "labels": ["A", "B", "C"],
        "answer": "A",
    }
    return row | changes


def boolq_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    row = {"id": f"train-{number}", "passage": f"Rome has {number} hills.", "question": "is rome flat", "answer": False}
    return row | changes


def winogrande_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"w{number}",
        "sentence": f"The cup did not fit in box {number} because the _ was small.",
        "option1": f"{number} cups",
        "option2": f"{number} boxes in a row",
        "answer": "2",
    }
    return row | changes


def own_row(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {"question": f"Is {number} even?", "choices": ["yes", "no"], "answer": number % 2} | changes
