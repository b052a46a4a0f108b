"""Digests of large files, remembered so that a file that has not changed is not read again."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import suppress
from pathlib import Path

from bayeslora.atomic_files import replacing

SETTLED = 2 * 10**9
"""Nanoseconds since a file's last change from which its digest is remembered: another change may come with the same times."""


def remembered_digest(file: Path, folder: Path) -> str:
    """The SHA-256 digest of a file's content, kept in ``folder`` for as long as the file's size and times stay the same."""
    found = file.stat()
    state = [str(number) for number in (found.st_size, found.st_mtime_ns, found.st_ctime_ns)]
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    note = folder / f"{file.stem}-{place}.digest"
    known = _recall(note, state)
    if known is not None:
        return known
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) > SETTLED:
        _remember(note, " ".join([digest, *state]))
    return digest


def _recall(note: Path, state: list[str]) -> str | None:
    """The digest in a note, if the note is whole and about a file in this state."""
    try:
        digest, *known = note.read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # there is none, or it is damaged
        return None
    return digest if known == state and re.fullmatch("[0-9a-f]{64}", digest) else None


def _remember(note: Path, text: str) -> None:
    with suppress(OSError):  # it is only slower without
        note.parent.mkdir(parents=True, exist_ok=True)
        with replacing(note) as partial:
            partial.write_text(text, encoding="utf-8")
