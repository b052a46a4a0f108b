"""Atomic writes: files are written next to their target, flushed to disk, then renamed to it.

Temporary files have predictable names. So they are always created anew, and a link of that name is removed and never
followed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from bayeslora.errors import InputError


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an exception.

    A process that dies inside leaves the old file unchanged and a ``.partial`` file, which the next attempt replaces.
    ``mode`` has the permissions of the new file, of which the umask may take some away.
    """
    partial = path.with_name(f"{path.name}.partial")
    _remove(partial)
    create(partial, mode)
    allowed = stat.S_IMODE(partial.stat().st_mode)
    try:
        yield partial
        if partial.stat().st_size == 0:
            raise FileNotFoundError(f"{partial}: nothing was written")
        partial.chmod(allowed)  # safetensors puts a file of its own there
        _flush(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush(path.parent)


def create(path: Path, mode: int = 0o666) -> None:
    """Create an empty file; fail if the path exists, even as a link."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
    os.close(os.open(path, flags, mode))


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that replaces ``path`` when the block ends without an exception."""
    partial = path.with_name(f"{path.name}.partial")
    _remove(partial)
    partial.mkdir()
    yield partial
    _share_weights(partial)
    _remove(path)
    partial.rename(path)


def _remove(path: Path) -> None:
    """Remove a directory tree, a file or a link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    with suppress(FileNotFoundError):
        os.unlink(path)


def _share_weights(directory: Path) -> None:
    """Give weights below a new directory the permissions that other new files have: safetensors writes them for their owner."""
    allowed = directory.stat().st_mode & 0o666
    for path in directory.rglob("*.safetensors"):
        path.chmod(allowed)


@contextmanager
def new_directory(place: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a directory that is moved to ``place`` when the block ends without an exception. A non-empty ``place`` is refused.

    It is filled next to ``place``, by one process at a time; leftovers of a process that died are removed.

    Args:
        place: path of the directory.
        force: replace a directory that is not empty.
    """
    require_new(place, force=force)
    with _scratch(place) as scratch:
        new, old = scratch / "new", scratch / "old"
        new.mkdir()
        yield new
        _share_weights(new)
        for path in new.rglob("*"):
            _flush(path)
        if place.exists():
            place.rename(old)
        try:
            new.rename(place)
        except OSError:
            if old.exists() and not place.exists():
                old.rename(place)
            raise
    _flush(place.parent)


def require_new(place: Path, *, force: bool = False) -> None:
    """Refuse a path where :func:`new_directory` cannot make a directory."""
    if place.is_file() or (place.is_dir() and any(place.iterdir()) and not force):
        what = "is a file" if place.is_file() else "is not empty"
        raise InputError(f"{place}: {what}; choose another directory")
    if place.is_dir() and (place.samefile(Path.cwd()) or os.path.ismount(place)):  # cannot be replaced
        what = "is a mount point" if os.path.ismount(place) else "is the working directory"
        raise InputError(f"{place}: {what}; choose a directory in it")


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """Yield an empty directory next to ``place``, locked by this process and removed at the end."""
    scratch = place.with_name(f".{place.name}.partial")
    lock = FileLock(scratch / "lock")
    try:
        while True:
            if scratch.is_symlink():
                scratch.unlink()
            scratch.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just ended and removed it
                lock.acquire(blocking=False)
                if (scratch / "lock").exists():
                    break
                lock.release()
    except Timeout:
        raise InputError(f"{place}: another process is writing it; wait for it, or choose another directory") from None
    except OSError as error:
        raise InputError(f"{place}: cannot be written: {error.strerror}; choose another directory") from error
    try:
        for leftover in scratch.iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


@contextmanager
def tensor_failures(path: Path) -> Iterator[None]:
    """Re-raise a write failure of safetensors (a full disk, no permission) as an ``OSError``."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error


def write_json(path: Path, value: Any, mode: int = 0o666) -> None:
    """Write a JSON file."""
    with replacing(path, mode) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
