"""Files that are there whole or not at all: written beside their place, flushed to disk, then renamed into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bayeslora.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of ``path`` when the block ends well.

    A process that dies inside leaves the old file as it was, and a ``.partial`` one that the next attempt overwrites.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush(path.parent)


@contextmanager
def new_directory(place: Path) -> Iterator[Path]:
    """A directory to fill, which appears at ``place`` when the block ends well. One that holds something is refused."""
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        what = "is a file" if place.is_file() else "is not empty"
        raise InputError(f"{place}: {what}; choose another directory")
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as folder:
        whole = Path(folder) / place.name
        yield whole
        if place.exists():
            place.rmdir()
        whole.rename(place)


@contextmanager
def tensor_failures(path: Path) -> Iterator[None]:
    """What safetensors raises when it cannot write (a full disk, no permission), as the ``OSError`` that it is."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
