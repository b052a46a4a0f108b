"""Digests of large files."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from bayeslora.models import digests
from bayeslora.models.digests import remembered_digest


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(digests, "SETTLED", -1)  # files of tests are young
    (tmp_path / "large.gguf").write_text("one")
    return tmp_path / "large.gguf"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes every file whose content is read."""
    seen: list[str] = []
    original = hashlib.file_digest

    def note(content, name):  # type: ignore[no-untyped-def]
        seen.append(content.name)
        return original(content, name)

    monkeypatch.setattr(hashlib, "file_digest", note)
    return seen


def test_a_file_is_read_once(file: Path, tmp_path: Path, read: list[str]) -> None:
    assert [remembered_digest(file, tmp_path / "notes") for _ in range(3)] == [digest_of("one")] * 3
    assert len(read) == 1


def test_a_changed_file_is_read_again(file: Path, tmp_path: Path, read: list[str]) -> None:
    remembered_digest(file, tmp_path)
    before = file.stat()
    time.sleep(0.02)  # more than the clock of a file system may be off
    file.write_text("two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered_digest(file, tmp_path) == digest_of("two") and len(read) == 2


def test_a_young_file_is_not_remembered(
    file: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "SETTLED", 3600 * 10**9)
    assert [remembered_digest(file, tmp_path / "notes") for _ in range(2)] == [digest_of("one")] * 2
    assert len(read) == 2 and not (tmp_path / "notes").exists()


def test_files_of_the_same_name_have_their_own(file: Path, tmp_path: Path, read: list[str]) -> None:
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    other.write_text("two")
    for _ in range(2):
        assert remembered_digest(file, tmp_path) == digest_of("one")
        assert remembered_digest(other, tmp_path) == digest_of("two")
    assert len(read) == 2


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"short 1 2 3", None])
def test_a_damaged_note_is_made_anew(damage: bytes | None, file: Path, tmp_path: Path, read: list[str]) -> None:
    remembered_digest(file, tmp_path)
    (note,) = tmp_path.glob("*.digest")
    note.write_bytes(b"../" + note.read_bytes()[3:] if damage is None else damage)
    assert [remembered_digest(file, tmp_path) for _ in range(2)] == [digest_of("one")] * 2 and len(read) == 2


def test_where_no_note_can_be_kept_the_file_is_read(file: Path, read: list[str]) -> None:
    assert [remembered_digest(file, file) for _ in range(2)] == [digest_of("one")] * 2 and len(read) == 2
