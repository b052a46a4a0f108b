"""A full disk, a place that cannot be written, two processes at once, a clock that goes backwards: one clear line or no harm."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from faults.commands import COMMANDS, Sources, require_whole
from faults.processes import Forked

pytestmark = pytest.mark.system

ALL = pytest.mark.parametrize("verb", COMMANDS)


@pytest.fixture(scope="module")
def undisturbed(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The results of all commands."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for verb, command in COMMANDS.items():
        assert Forked(command.words(sources, folder / verb)).wait() == 0
    return {verb: folder / verb for verb in COMMANDS}


def complaint(log: Path) -> str:
    """What was printed on stderr: one line of ours at the end, and no traceback."""
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text, text
    last = text.splitlines()[-1]
    assert last.startswith("bayeslora: "), text
    return last


def limit(size: int) -> None:
    """From now on no file of this process grows beyond so many bytes: writes fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@ALL
@pytest.mark.parametrize("size", [0, 1000])
def test_where_files_cannot_grow(
    verb: str, size: int, sources: Sources, undisturbed: dict[str, Path], tmp_path: Path
) -> None:
    command, out = COMMANDS[verb], tmp_path / "out"
    code = Forked(command.words(sources, out), partial(limit, size), tmp_path / "log").wait()
    assert code in (1, 2), (tmp_path / "log").read_text()
    if size == 0:
        assert (tmp_path / "log").read_text() == ""  # stderr is a file too
    if out.exists():
        require_whole(out)
    assert Forked(command.words(sources, out)).wait() == 0
    assert command.outcome(out) == command.outcome(undisturbed[verb])


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 KiB, where this machine lets us have one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.slow
@ALL
def test_a_full_disk(
    verb: str, sources: Sources, undisturbed: dict[str, Path], small_disk: Path, tmp_path: Path
) -> None:
    """Full to all but a few kilobytes; when there is room again the same command ends the work."""
    command, out = COMMANDS[verb], small_disk / "out"
    for room in (0, 8, 64):
        with (small_disk / "filler").open("wb") as filler:
            filler.write(bytes(1024 * (256 - room - 16)))
        code = Forked(command.words(sources, out), log=tmp_path / "log").wait()
        if code != 0:
            assert code in (1, 2) and complaint(tmp_path / "log")
        if out.exists():
            require_whole(out)
        (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    if not (command.appears_whole and out.exists()):
        assert Forked(command.words(sources, out)).wait() == 0
    assert command.outcome(out) == command.outcome(undisturbed[verb])


@pytest.fixture
def read_only(tmp_path: Path) -> Path:
    """Where nothing can be made, not even by root."""
    if os.geteuid() == 0:
        return Path("/proc/nothing")
    place = tmp_path / "read-only"
    place.mkdir(mode=0o555)
    return place


@ALL
def test_a_place_that_cannot_be_written(verb: str, sources: Sources, read_only: Path, tmp_path: Path) -> None:
    words = COMMANDS[verb].words(sources, read_only / "out")
    assert Forked(words, log=tmp_path / "log").wait() in (1, 2)
    assert str(read_only) in complaint(tmp_path / "log")


@ALL
def test_two_processes_on_one_place(verb: str, sources: Sources, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    """One of them does the work. The other is refused, or comes when all is done."""
    command, out = COMMANDS[verb], tmp_path / "out"
    logs = [tmp_path / "first", tmp_path / "second"]
    processes = [Forked(command.words(sources, out), log=log) for log in logs]
    codes = [process.wait() for process in processes]
    assert sorted(codes) in ([0, 0], [0, 2]), [log.read_text() for log in logs]
    for code, log in zip(codes, logs, strict=True):
        if code == 2:
            said = complaint(log)
            assert "another process" in said or "exists already" in said or "not empty" in said
    assert command.outcome(out) == command.outcome(undisturbed[verb])


def backwards() -> None:
    """From now on the clock of this process goes backwards, a minute at a time."""
    count, start = itertools.count(), time.time()
    time.time = lambda: start - 60 * next(count)


@ALL
def test_a_clock_that_goes_backwards(verb: str, sources: Sources, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    command, out = COMMANDS[verb], tmp_path / "out"
    assert Forked(command.words(sources, out), backwards).wait() == 0
    assert command.outcome(out) == command.outcome(undisturbed[verb])
